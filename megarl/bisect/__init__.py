"""Find the first tensor of a forward pass that engine and trainer compute differently, and say why."""
