"""Manage the process on its host: signals, exit codes, and the janitor that leaves nothing behind."""
