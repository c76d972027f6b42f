"""What a run would do and need, computed from its configuration and the model's config.json alone."""
