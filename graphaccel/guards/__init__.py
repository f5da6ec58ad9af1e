"""Python values that a forward reads: which they are, what they were, and numbers as inputs."""
