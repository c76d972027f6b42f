"""Find out whether this machine can run megarl: what is installed, what is missing, and how to get it."""
