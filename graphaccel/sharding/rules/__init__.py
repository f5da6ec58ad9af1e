"""Which placements of an op's tensors are legal: one line of index notation an op."""
