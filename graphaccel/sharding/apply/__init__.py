"""Rewrite a graph for one rank of a mesh axis, from placements that are already solved."""
