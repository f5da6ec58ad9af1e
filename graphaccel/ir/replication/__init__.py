"""Graphs of many identical layers, derived from graphs of few layers."""
