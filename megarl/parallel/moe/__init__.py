"""Train mixture-of-experts layers: routing of packed tokens, load balancing, and replay of recorded routing."""
