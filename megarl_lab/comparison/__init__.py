"""Compare runs of several algorithms and seeds."""
