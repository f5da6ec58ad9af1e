"""Branch and bound over the candidate plans."""
