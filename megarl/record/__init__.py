"""Record what a run does while it works: metrics, its timeline, progress, profiles, sampled rollouts."""
