"""Dispatch: prepares a model at its first batch, then runs the compiled step of each batch."""
