"""Checkpoints: a run's whole state in one folder a step, saved and loaded under any plan."""
