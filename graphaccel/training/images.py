"""Rows of pictures with their classes: a folder of folders, or arrays in an .npz file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from graphaccel.errors import BadData, BadTraining

_ENDINGS = {".bmp", ".jpeg", ".jpg", ".png", ".webp"}


class Pictures(Dataset):
    """Pictures of [channels, high, wide] float32 between -1 and 1, and the number of each's class.

    numbers: of the classes by name. Raises BadData (GA417) for a picture that can not be read, or
    whose class is none of these.
    """

    def __init__(
        self, pictures: Sequence[Any], labels: Sequence[str], numbers: Mapping[str, int],
        shape: tuple[int, int, int],
    ) -> None:  # fmt: skip
        for picture, label in zip(pictures, labels, strict=True):
            if label not in numbers:
                raise BadData(
                    place=str(picture)[:60],
                    reason=f"its class {label!r} is none of the {len(numbers)} classes",
                )
        self.pictures, self.labels, self.numbers, self.shape = pictures, labels, numbers, shape

    def __len__(self) -> int:
        return len(self.pictures)

    def __getitem__(self, row: int) -> dict[str, torch.Tensor]:
        picture = self.pictures[row]
        values = _read(picture, self.shape) if isinstance(picture, Path) else picture
        pixels = torch.as_tensor(np.ascontiguousarray(values)).float() / 127.5 - 1
        channels, high, wide = self.shape
        if pixels.dim() == 2:
            pixels = pixels[..., None]
        pixels = pixels.permute(2, 0, 1)
        if pixels.shape[0] != channels:
            pixels = pixels[:1].expand(channels, -1, -1)
        if pixels.shape[1:] != (high, wide):
            pixels = torch.nn.functional.interpolate(
                pixels[None], (high, wide), mode="bilinear", align_corners=False
            )[0]
        label = torch.tensor(self.numbers[self.labels[row]])
        return {"pixel_values": pixels.contiguous(), "labels": label}


def read_pictures(paths: Sequence[str]) -> tuple[list[Any], list[str]]:
    """Pictures (files, or [high, wide(, channels)] uint8) and the names of their classes.

    Raises BadData (GA417) for a file of another form, and where there is none.
    """
    pictures: list[Any] = []
    labels: list[str] = []
    for path in map(Path, paths):
        if path.suffix == ".npz" and path.is_file():
            more, names = _arrays(path)
        elif path.is_dir():
            more = [f for f in sorted(path.glob("*/*")) if f.suffix.lower() in _ENDINGS]
            names = [file.parent.name for file in more]
        else:
            raise BadData(place=str(path), reason="it is no folder of classes and no .npz file")
        pictures += more
        labels += names
    if not pictures:
        raise BadData(place=", ".join(paths), reason="it has no picture in a folder of a class")
    return pictures, labels


def _arrays(path: Path) -> tuple[list[Any], list[str]]:
    try:
        with np.load(path, allow_pickle=False) as file:
            images, labels = file["images"], file["labels"]
    except (KeyError, ValueError, OSError) as error:
        raise BadData(
            place=str(path), reason=f"it has no arrays `images` and `labels`: {error}"
        ) from error
    if images.dtype != np.uint8 or images.ndim not in (3, 4) or len(images) != len(labels):
        raise BadData(
            place=str(path),
            reason=f"`images` is {images.dtype} {list(images.shape)}, `labels` "
            f"{list(labels.shape)}; they must be uint8 [count, high, wide(, channels)] and [count]",
        )
    return list(images), [str(label) for label in labels]


def _read(path: Path, shape: tuple[int, int, int]) -> np.ndarray:
    try:
        from PIL import Image  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise BadTraining(
            what="folders of pictures need Pillow", help_line="pip install pillow"
        ) from error
    try:
        with Image.open(path) as picture:
            mode = "L" if shape[0] == 1 else "RGB"
            return np.asarray(picture.convert(mode).resize((shape[2], shape[1])))
    except OSError as error:
        raise BadData(place=str(path), reason=str(error)) from error
