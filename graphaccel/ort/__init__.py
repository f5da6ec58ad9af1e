"""ONNX Runtime: regions of a stage's forward or backward graph as sessions of their own.

`translate.py` turns a region into an ONNX model with the help of `ops/`; `kernels.py` knows what
the installed build can run; `session.py` runs a model on torch's own memory.
"""
