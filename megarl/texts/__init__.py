"""Look for what is dangerous in texts: secrets, hidden characters, and what UTF-8 cannot hold."""
