"""One form per computation of a forward graph, for fusion and sharding rules."""
