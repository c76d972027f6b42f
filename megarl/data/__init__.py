"""Prompts and demonstrations: files, chat templates, sampling, packing, built-in tasks, the tiny model."""
