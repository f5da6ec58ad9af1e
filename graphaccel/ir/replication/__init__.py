"""Derive the graphs of deep models with identical layers from graphs of few layers."""
