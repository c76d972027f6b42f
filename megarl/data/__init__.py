"""Read prompts and demonstrations, encode them, sample and pack batches; also build a tiny model for experiments."""
