"""One process: BERT of transformers with `fusions="auto"`, against the same model run eagerly."""

from __future__ import annotations

from typing import Any

from benchmarks.shared import transformer
from benchmarks.shared.common import Settings, run


def worker(settings: Settings) -> dict[str, dict[str, Any]]:
    """Both sides on the one rank."""
    return transformer.sides(transformer.bert, settings)


if __name__ == "__main__":
    run("bert", 1, worker)
