"""Which bytes go from which rank to which engine worker: pure planning, computed alike by every process."""
