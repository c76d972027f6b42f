"""Evaluate a model on data sets with ground truths: pass@k, avg@n and greedy accuracy by data source."""
