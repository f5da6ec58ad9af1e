"""Closed-form estimates of a plan's memory and time, without running any pass."""
