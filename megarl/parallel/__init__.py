"""Train models with Megatron-Core, which only this package imports. Each process is one rank of a Megatron layout."""
