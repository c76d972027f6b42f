"""Plan what a run would do and need from its configuration and the model's config.json alone."""
