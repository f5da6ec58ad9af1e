"""Passes that accumulate, reduce and shard gradients."""
