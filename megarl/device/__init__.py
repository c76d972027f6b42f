"""The device that a process computes on, CPU or CUDA, and the accelerators of a host."""
