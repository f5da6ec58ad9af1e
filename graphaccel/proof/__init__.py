"""Checks that a captured step computes what the user's model computes: runs both and compares."""
