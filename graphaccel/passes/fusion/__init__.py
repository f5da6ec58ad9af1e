"""Fusion: replace subgraphs with the fused ops that compute the same."""
