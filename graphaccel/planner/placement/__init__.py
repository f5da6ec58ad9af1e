"""The placement of every tensor on the axes that shard the graph, solved or checked for a plan."""
