"""Send weights from the ranks that hold them to the engine workers that lack them, slice by slice, by a static plan."""
