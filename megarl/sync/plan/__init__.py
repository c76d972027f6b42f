"""Plan which bytes each trainer rank sends to each engine worker. Every process computes the same plan, without I/O."""
