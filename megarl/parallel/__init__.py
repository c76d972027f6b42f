"""Run the training side: the only room that imports megatron. One process holds one Megatron layout."""
