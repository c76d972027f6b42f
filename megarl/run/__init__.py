"""Run whole runs and queues of runs, from a configuration to a report."""
