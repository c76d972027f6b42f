"""Record what a run does while it works: metrics, progress, profiles, sampled rollouts."""
