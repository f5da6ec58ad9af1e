"""Reads pins from Hugging Face's TrainingArguments, and refuses what contradicts a plan."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from graphaccel.errors import GraphMisuse
from graphaccel.integrations.settings import with_precision

_LAUNCHED = "ACCELERATE_MIXED_PRECISION"
_REPLACED = {  # set in TrainingArguments → what to write instead
    "deepspeed": 'optimize={"zero": 3}',
    "fsdp": 'optimize={"zero": 3}',
    "parallelism_config": 'optimize={"tensor": 2}',
    "torch_compile": 'optimize={"compile": "inductor"}',
    "auto_find_batch_size": 'optimize={"microbatches": 4}',
    "fp16_full_eval": "fp16=True",
    "bf16_full_eval": "bf16=True",
}
_HOOKS = {  # set in TrainingArguments → what to write instead
    "neftune_noise_alpha": "add the noise in the forward of a model of your own:  "
    "embedded += torch.empty_like(embedded).uniform_(-size, size)",
    "debug": 'on_nonfinite names a loss that is none:  optimize={"on_nonfinite": "error"}',
}


def pins_of(args: Any, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The keyword arguments of `graphaccel.optimize`, with the precision that `args` asks for.

    args: transformers.TrainingArguments; its own mixed precision is turned off, as the plan's takes
        its place.

    Raises GraphMisuse (GA407) for an argument that the plan decides, or another precision.
    """
    for name, instead in _REPLACED.items():
        if getattr(args, name, None):
            raise GraphMisuse(
                what=f"TrainingArguments({name}=...) asks for what the plan decides",
                help_line=f"leave it out; the plan's own is:  {instead}",
            )
    for name, instead in _HOOKS.items():
        if getattr(args, name, None):
            raise GraphMisuse(
                what=f"TrainingArguments({name}=...) hangs hooks on modules, which the graph of a "
                "step does not call",
                help_line=f"leave it out; {instead}",
            )
    asked = "bf16" if args.bf16 else "fp16" if args.fp16 else None
    argument = f"TrainingArguments({asked}=True)"
    if asked is None and (launched := os.environ.get(_LAUNCHED, "no")) != "no":
        asked, argument = launched, f"accelerate launch --mixed_precision {launched}"
    pins = with_precision(settings, asked, argument)
    args.mixed_precision = "no"
    return pins
