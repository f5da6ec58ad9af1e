"""Entries of timm's and torchvision's classification models, on small images."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.coverage.entry import SEED, Entry, NotMeasured, first_line

BATCH, CLASSES = 4, 4
TIMM = 100
"""So many of timm's models, evenly from its list of families; each family's smallest."""
MOST_PARAMETERS = {torch.float64: 40_000_000, torch.float32: 140_000_000}
_SIZES = (32, 64, 96, 224, 299)
_CHANCES = {
    "Dropout": ("p",),
    "Dropout2d": ("p",),
    "DropPath": ("drop_prob",),
    "StochasticDepth": ("p",),
    "PatchDropout": ("prob",),
}
"""Modules that draw numbers, of which a split has others, and the attribute that stops them."""


class Classified(nn.Module):
    """A classifier with its loss: the cross entropy of its (first) output."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        output = self.model(images)
        logits = output if isinstance(output, Tensor) else output[0]
        return F.cross_entropy(logits, labels)


def timm_names() -> list[str]:
    """A hundred of timm's models: one for each of evenly chosen families."""
    timm = _timm()
    families: dict[str, list[str]] = {}
    for name in sorted(timm.list_models()):
        families.setdefault(name.split("_")[0], []).append(name)
    first = [names[0] for _, names in sorted(families.items())]
    return [first[i * len(first) // TIMM] for i in range(TIMM)] if len(first) > TIMM else first


def timm_entry(name: str, *, split: bool, dtype: torch.dtype = torch.float64) -> Entry:
    """A model of timm without pretrained weights or dropout."""
    return _made("timm", name, dtype, *_size("timm", name, dtype))


def torchvision_names() -> list[str]:
    """All of torchvision's classification models."""
    vision = _torchvision()
    return sorted(vision.models.list_models(module=vision.models))


def torchvision_entry(name: str, *, split: bool, dtype: torch.dtype = torch.float64) -> Entry:
    """A model of torchvision without weights or dropout."""
    return _made("torchvision", name, dtype, *_size("torchvision", name, dtype))


def _model(library: str, name: str, more: Mapping[str, int]) -> nn.Module:
    if library == "torchvision":
        vision = _torchvision()
        return vision.models.get_model(name, weights=None, num_classes=CLASSES, **more)
    return _timm().create_model(name, pretrained=False, num_classes=CLASSES, **more)


def _made(library: str, name: str, dtype: torch.dtype, size: int, more: Mapping[str, int]) -> Entry:
    torch.manual_seed(SEED)
    model = _model(library, name, more).to(dtype).train()
    for module in model.modules():
        for chance in _CHANCES.get(type(module).__name__, ()):
            if hasattr(module, chance):
                setattr(module, chance, 0.0)
    generator = torch.Generator().manual_seed(SEED)
    images = torch.randn(BATCH, 3, size, size, generator=generator, dtype=dtype)
    labels = torch.randint(CLASSES, (BATCH,), generator=generator)
    return Entry(Classified(model), (images, labels))


@functools.lru_cache(maxsize=8)
def _size(library: str, name: str, dtype: torch.dtype) -> tuple[int, dict[str, int]]:
    """The smallest image that the model takes in training, and what it must be told of it."""
    try:
        with torch.device("meta"):
            model = _model(library, name, {})
    except NotImplementedError:  # it computes its widths with tensors
        model = _model(library, name, {})
    count = sum(p.numel() for p in model.parameters())
    if count > MOST_PARAMETERS[dtype]:
        raise NotMeasured(f"{count:,} parameters are too many in {str(dtype)[6:]}")
    error: Exception | None = None
    for size in _SIZES:
        for more in ({"img_size": size}, {"image_size": size}, {}):
            try:
                if torch.isfinite(_made(library, name, dtype, size, more)()):
                    return size, more
            except Exception as found:
                error = error or found
    raise NotMeasured(f"no small image: {first_line(error or ValueError('no number'))}")


def _timm() -> Any:
    """timm. Raises NotMeasured."""
    _torchvision()
    if importlib.util.find_spec("timm") is None:
        raise NotMeasured("timm is not installed: pip install 'graphaccel[coverage]'")
    import timm

    return timm


def _torchvision() -> Any:
    """torchvision, which timm needs too. Raises NotMeasured."""
    if importlib.util.find_spec("torchvision") is None:
        raise NotMeasured("torchvision is not installed: pip install 'graphaccel[coverage]'")
    declare_operators()
    import torchvision

    return torchvision


@functools.cache
def declare_operators() -> Any:
    """torchvision's compiled operators, which no classifier uses, do not load beside a build of
    torch for another device, and its import then fails for want of two of them: they are declared
    here without code, and raise if one is called."""
    if importlib.util.find_spec("torchvision") is None:
        return None
    try:
        import torchvision  # noqa: F401
    except RuntimeError:
        library = torch.library.Library("torchvision", "FRAGMENT")
        library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        return library  # the declarations live as long as it does
