"""Train: the step from prompts to new weights, and everything that a run checks, saves and exports around it."""
