"""One training step, from prompts to new weights, and what a run reads, checks, saves and exports around it."""
