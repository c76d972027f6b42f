"""Plan which bytes go from which rank to which engine worker, by pure computation that gives every process the same."""
