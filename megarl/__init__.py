"""Train language models by reinforcement learning (post-training) on Megatron-Core, vLLM and Ray."""

__version__ = "0.1.0"
