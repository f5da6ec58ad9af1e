"""Trees of containers: flattened to leaves, mapped, and with the path of each leaf."""

# With key paths; torch.utils.pytree of later versions has them publicly.
from torch.utils._pytree import (
    GetAttrKey,
    MappingKey,
    register_pytree_node,
    tree_flatten,
    tree_flatten_with_path,
    tree_leaves,
    tree_map,
    tree_map_only,
    tree_unflatten,
)

__all__ = [
    "GetAttrKey", "MappingKey", "register_pytree_node", "tree_flatten", "tree_flatten_with_path",
    "tree_leaves", "tree_map", "tree_map_only", "tree_unflatten",
]  # fmt: skip
