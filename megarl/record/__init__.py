"""What a run writes down while it works: metrics, progress, profiles, sampled rollouts."""
