"""Describe weights by name and shape: tables of model families, slices of Hugging Face tensors, safetensors files."""
