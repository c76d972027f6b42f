"""Ask what an algorithm does to a policy, by many runs."""
