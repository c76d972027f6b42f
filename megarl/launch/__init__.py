"""Run inside a Slurm allocation: start Ray on every host and the driver on the first, restart after failures, submit
jobs.
"""
