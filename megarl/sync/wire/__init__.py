"""How planned parts travel: shared memory within a host, process groups between hosts."""
