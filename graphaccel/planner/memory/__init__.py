"""Peak tensor bytes of a plan, counted over the graphs that run."""
