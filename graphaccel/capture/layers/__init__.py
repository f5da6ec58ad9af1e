"""Repeated layers of a model: found, captured once, and replicated."""
