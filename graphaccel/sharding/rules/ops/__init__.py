"""Sharding rules of ops, one file a kind of op."""
