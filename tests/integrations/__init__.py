"""Optimized models in the training loops of other libraries."""
