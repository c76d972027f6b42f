"""Carry the messages of a plan: in shared memory within a host, over process groups between hosts."""
