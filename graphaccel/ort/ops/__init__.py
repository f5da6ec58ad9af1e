"""Translations of ATen ops to ONNX nodes, one file per family; `table.py` collects them.

A translation is `(builder, node, arguments) -> Value` (or a list of them for an op with several
results). arguments: those of the op's schema by name, defaults filled in, tensors as Values. The
shape and dtype of the result are in `node.meta["val"]`.
"""
