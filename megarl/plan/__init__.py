"""Plan what a run would do, and what memory it needs, from its configuration and the model's config.json alone."""
