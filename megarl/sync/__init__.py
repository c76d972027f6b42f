"""Weights from the ranks that hold them to the engine workers that lack them, slice to slice, by a static plan."""
