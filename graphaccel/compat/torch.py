"""Everything graphaccel uses of torch that torch does not promise to keep.

The only file that may import names with an underscore from torch. Each name says what it is used
for, so that a new torch version is checked here and nowhere else.
"""

from __future__ import annotations

# Sees every operator that runs, also inside backward: measuring tensor bytes (runtime/meter.py).

# Raised by export where the user's code branches on the value of a tensor (capture/export.py).
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode as DataDependentError

# Trees with key paths; torch.utils.pytree of later versions has them publicly.
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass

__all__ = ["DataDependentError", "TorchDispatchMode", "is_traceable_wrapper_subclass"]
