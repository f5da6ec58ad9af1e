"""Compiles a model and a batch into programs: runs capture, planner and passes, and the probes."""
