"""Each kind of parallelism beside the implementation that comes with PyTorch."""
