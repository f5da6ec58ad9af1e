"""Inductor: the pieces of a stage's graph that it compiles."""
