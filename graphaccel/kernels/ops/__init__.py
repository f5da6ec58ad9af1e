"""The fused ops: each file holds everything about one, from its kernel to its sharding rule."""
