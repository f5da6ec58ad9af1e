"""Sharding over one mesh axis: sharding rules of ops, the placement solver, the graph rewrite."""
