"""The generating side: the only room that imports vllm."""
