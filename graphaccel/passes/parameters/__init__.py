"""Passes that gather, cast and prefetch the parameters that a rank holds in part or elsewhere."""
