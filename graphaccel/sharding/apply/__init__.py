"""Rewrites a graph for one rank of a mesh axis, by placements that are solved."""
