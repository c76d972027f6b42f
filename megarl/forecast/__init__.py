"""Predict the speed of layouts and schedules by cost models, which no cluster has confirmed yet."""
