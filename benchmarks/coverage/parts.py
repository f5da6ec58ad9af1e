"""The lists that are measured, by name."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

from benchmarks.coverage import hugging_face, torch_lists, vision
from benchmarks.coverage.entry import Entry
from tests.support.casts import lift_captured_casts, lift_loss_cast


@dataclass(frozen=True)
class Part:
    """names: of all entries; build: makes one; about: what the list is.

    lifted: casts to float32 in the model's code are casts to float64 (`tests.support.casts`), so
    that rounding hides no difference.
    """

    names: Callable[[], list[str]]
    build: Callable[..., Entry]
    about: str
    lifted: bool = False


PARTS: Mapping[str, Part] = {
    "op_db": Part(torch_lists.op_names, torch_lists.op_entry, "torch's differentiable operators"),
    "module_db": Part(torch_lists.module_names, torch_lists.module_entry, "torch.nn"),
    "transformers": Part(
        hugging_face.names, hugging_face.entry, "transformers' auto-model classes", lifted=True
    ),
    "timm": Part(vision.timm_names, vision.timm_entry, "timm, a model of each family", lifted=True),
    "torchvision": Part(
        vision.torchvision_names, vision.torchvision_entry, "torchvision's classifiers", lifted=True
    ),
}


def build(part: str, name: str, *, split: bool, dtype: torch.dtype = torch.float64) -> Entry:
    """An entry, with the same numbers in every process and at every call.

    dtype: of models; operators are in float64 where they can.
    Raises NotMeasured with the reason why it can not be measured.
    """
    torch.manual_seed(zlib.crc32(name.encode()))
    if PARTS[part].lifted:
        return PARTS[part].build(name, split=split, dtype=dtype)
    return PARTS[part].build(name, split=split)


def casts_of(
    part: str, dtype: torch.dtype, *, planned: bool = False
) -> AbstractContextManager[None]:
    """What casts to float32 are to be while entries of a part are built and run, by themselves or
    planned, where only the model's own code may cast."""
    if not PARTS[part].lifted or dtype != torch.float64:
        return nullcontext()
    return lift_captured_casts() if planned else lift_loss_cast()
