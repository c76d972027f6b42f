"""Run megarl in Slurm: submit jobs, start Ray on every host and the driver on the first, restart after failures."""
