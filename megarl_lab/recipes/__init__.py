"""Make what examples and tests train on: built-in tasks, prepared public data sets, small models, the quick start."""
