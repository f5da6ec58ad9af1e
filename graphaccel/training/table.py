"""Rows whose number is known, as every data set of `graphaccel train` has them."""

from __future__ import annotations

from typing import Any, Protocol

from torch.utils.data import Dataset


class Table(Protocol):
    """A data set with a length; a row is a dict of tensors."""

    def __len__(self) -> int: ...

    def __getitem__(self, row: int, /) -> Any: ...


class FirstRows(Dataset):
    """The first rows of a table, at most all."""

    def __init__(self, rows: Table, count: int) -> None:
        self.rows, self.count = rows, min(count, len(rows))

    def __len__(self) -> int:
        return self.count

    def set_epoch(self, epoch: int) -> None:
        """Tell rows that are others in each epoch."""
        tell = getattr(self.rows, "set_epoch", None)
        if tell is not None:
            tell(epoch)

    def __getitem__(self, row: int) -> Any:
        if not 0 <= row < self.count:
            raise IndexError(row)
        return self.rows[row]
