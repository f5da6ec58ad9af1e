"""Capture: an unchanged model and a batch become one graph of the whole training step."""
