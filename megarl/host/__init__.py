"""Handle what concerns the process on its host: signals, exit codes, and the janitor that cleans up after a run."""
