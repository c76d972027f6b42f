"""Find out whether this machine can run megarl: what is there, what is missing, and how to get it."""
