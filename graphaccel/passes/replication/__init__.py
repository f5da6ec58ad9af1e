"""Rewrites few layers or one of several equal stages, and repeats the result."""
