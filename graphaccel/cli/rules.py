"""`graphaccel explain FILE:FUNCTION --rules`: prints the sharding rule of every op of a step."""

from __future__ import annotations

from pathlib import Path

import torch

from graphaccel.api import cluster_here
from graphaccel.capture.stepgraph import capture
from graphaccel.cli.jobs import find_job
from graphaccel.report.rules import missing, priced_rules, rules_text


def rules_command(file: Path, function: str | None, *, strict: bool) -> int:
    """Print the rules; ops without one come first, priced on a device of this machine.

    Raises MissingRule (GA301) if `strict` and an op has none.
    """
    job = find_job(file, function)
    step = capture(job.model, job.batch, job.loss_fn)
    device = cluster_here(1, torch.device("cuda" if torch.cuda.is_available() else "cpu")).device
    rows = priced_rules(step, device)
    print(rules_text(rows, type(job.model).__name__, device), end="")
    error = missing(rows) if strict else None
    if error is not None:
        raise error
    return 0
