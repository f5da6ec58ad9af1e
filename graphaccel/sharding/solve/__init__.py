"""Placement solver: the cheapest placement of every tensor of a graph on one mesh axis."""
