"""Saving and loading tensors in parts, without the warnings of torch.distributed.checkpoint."""

from __future__ import annotations

from typing import Any

from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict
from torch.distributed.checkpoint.state_dict_saver import _save_state_dict
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter
from torch.serialization import get_crc32_options, set_crc32_options


def save_tensors(tensors: dict[str, Any], writer: StorageWriter, group: Any) -> Metadata:
    """`torch.distributed.checkpoint.save`, without its warning for a process that is alone.

    group: of the ranks that call it; None for this process alone. Checksums are written whatever
    the script has set for its own files.
    """
    before = get_crc32_options()
    set_crc32_options(True)
    try:
        return _save_state_dict(tensors, writer, process_group=group, no_dist=group is None)
    finally:
        set_crc32_options(before)


def load_tensors(tensors: dict[str, Any], reader: StorageReader, group: Any) -> None:
    """`torch.distributed.checkpoint.load`, without its warnings: ranks may ask for different
    tensors, and a process may be alone."""
    _load_state_dict(tensors, reader, process_group=group, no_dist=group is None)
