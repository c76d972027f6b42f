"""Wrap the device that a process computes on, CPU or CUDA, and look up the accelerators of a host."""
