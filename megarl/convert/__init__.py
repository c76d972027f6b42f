"""Convert checkpoints between Hugging Face directories and Megatron's torch_dist format, without building a model.

The family's weight table gives the place of every row (`mapping`), so a conversion is a list of pieces (`plan`): each
is at most `PIECE_BYTES` of an output file and names the rows of source tensors that it consists of. Worker processes
(`engine`) read and write each piece once, at its place in a preallocated file, so neither the output nor a worker's
memory depends on the number of processes or layers. A journal of finished pieces lets a killed conversion continue.
"""
