"""Hide the differences between CPU and CUDA behind one interface, and look up the accelerators of a host."""
