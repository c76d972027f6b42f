"""Train with Megatron-Core; no other package imports megatron. One process holds one rank of one Megatron layout."""
