"""Run one training step, from prompts to new weights, and whatever a run reads, checks, saves and exports around it."""
