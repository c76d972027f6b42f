"""Simulate the schedules of asynchronous runs, from the costs that a run recorded."""
