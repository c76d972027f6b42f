"""Send weights from trainer ranks that hold them to engine workers that lack them, slice by slice, by a plan made
once.
"""
