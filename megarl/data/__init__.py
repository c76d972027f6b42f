"""Read prompts and demonstrations, encode them as token ids, and sample and pack batches; make the tiny model."""
