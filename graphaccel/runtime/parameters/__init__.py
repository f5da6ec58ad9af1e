"""Parameters, gradients and optimizer state of which this rank holds a shard."""
