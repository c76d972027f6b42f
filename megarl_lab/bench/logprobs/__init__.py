"""Compare heads that compute log-probs: time, memory and exactness."""
