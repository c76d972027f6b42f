"""Generate rollouts with vLLM engines; this is the only package of megarl that imports vllm."""
