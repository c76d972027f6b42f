"""Handle what concerns the process on its host: signals, exit codes, texts that it writes, the janitor after a run."""
