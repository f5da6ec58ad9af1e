"""Branch-and-bound search for the fastest plan that fits in memory."""
