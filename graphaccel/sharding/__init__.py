"""Sharding of a graph over one mesh axis: the rules of ops, the solver, and the rewrite."""
