"""Carry over run files, scripts and option names of other trainers."""
