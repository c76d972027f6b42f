"""Read and write files so that what goes wrong with one is a single line: its path, what was found, and the remedy."""
