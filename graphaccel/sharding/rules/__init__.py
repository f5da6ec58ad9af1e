"""Sharding rules: which placements of an op's tensors are legal, one line of notation an op."""
