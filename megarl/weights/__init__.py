"""Describe weights by name and shape: family tables, the mapping of shards to Hugging Face tensors, safetensors I/O."""
