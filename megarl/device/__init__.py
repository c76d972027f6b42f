"""The accelerator, or its absence: what differs between CPU and CUDA."""
