"""Runs regions of a stage's forward or backward graph as ONNX Runtime sessions.

`translate.py` converts a region to an ONNX model with the help of `ops/`; `kernels.py` finds out
what the installed build can run; `session.py` runs a model on torch's own memory.
"""
