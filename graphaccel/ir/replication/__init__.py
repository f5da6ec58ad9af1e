"""Graphs of many identical layers, made of the graphs of few."""
