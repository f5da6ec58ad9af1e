"""ATen ops as ONNX nodes, a file for each family; `table.py` holds them together.

A translation is `(builder, node, arguments) -> Value` (or a list of them for an op with several
results). arguments: those of the op's schema by name, defaults filled in, tensors as Values.
The shape and dtype of the result are in `node.meta["val"]`.
"""
