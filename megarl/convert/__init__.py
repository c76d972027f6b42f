"""Conversion of checkpoints between Hugging Face directories and Megatron's torch_dist format, without a model.

The place of every row follows from the family's weight table (`mapping`), so a conversion is a list of pieces (`plan`):
at most `PIECE_BYTES` of an output file, and the rows of source tensors it is made of. Worker processes (`engine`) read
each piece once and write it once, at its place in a preallocated file, so neither the bytes nor the memory depend on
the number of processes or of layers. A journal of finished pieces lets a killed conversion continue.
"""
