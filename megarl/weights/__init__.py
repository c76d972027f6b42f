"""Say which Hugging Face tensors make up a model's parameters, cut them into slices, read and write safetensors."""
