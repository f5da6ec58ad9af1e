"""Replaces what fused ops compute by those ops."""
