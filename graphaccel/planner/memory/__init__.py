"""The exact peak memory of a plan, counted on the graphs that will run."""
