"""Passes that cut a step into pipeline stages, and each stage into its phases."""
