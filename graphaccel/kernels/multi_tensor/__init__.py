"""Multi-tensor optimizer steps: one launch updates many tensors."""

from graphaccel.kernels.multi_tensor.steps import Around, MultiTensor

__all__ = ["Around", "MultiTensor"]
