"""Guards on the Python values that a forward reads, and numbers as graph inputs."""
