"""Python state of a model: what its forward reads, keeps and closes over."""
