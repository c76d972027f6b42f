"""Carry the messages of a weight sync: in shared memory within a host, over process groups between hosts."""
