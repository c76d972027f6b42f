"""Names and shapes of weights: family tables, the mapping of shards to Hugging Face tensors, safetensors io."""
