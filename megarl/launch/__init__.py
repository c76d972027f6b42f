"""Run inside a Slurm allocation: Ray on every host, the driver on the first, restarts, and how to submit it."""
