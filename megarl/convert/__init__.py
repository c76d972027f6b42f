"""Convert checkpoints between Hugging Face directories and Megatron's torch_dist format, without building a model.

The model family's weight table maps rows of Hugging Face tensors to rows of Megatron's (`mapping`). From this map,
`plan` splits the output into pieces: blocks of rows of at most `PIECE_BYTES`, each with the source rows to copy. Worker
processes (`engine`) write each piece once, at its offset in a preallocated file. A worker's memory therefore does not
grow with the model, and any number of workers writes the same bytes. A journal of finished pieces lets a killed
conversion continue.
"""
