"""Exports a plan as the configuration of torchtitan, Megatron-LM, DeepSpeed or Accelerate.

Each target gets what it can express; a decision it cannot express is refused, never dropped.
`report/targets/` has one file a target.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from graphaccel.errors import CannotExport
from graphaccel.planner.plan.plan_name import plan_name
from graphaccel.report.facts import Facts
from graphaccel.report.targets.accelerate import accelerate
from graphaccel.report.targets.common import Refusal, Refused
from graphaccel.report.targets.deepspeed import deepspeed
from graphaccel.report.targets.megatron import megatron
from graphaccel.report.targets.torchtitan import torchtitan

TARGETS: Mapping[str, Callable[[Facts, Refused], str]] = {
    "torchtitan": torchtitan,
    "megatron": megatron,
    "deepspeed": deepspeed,
    "accelerate": accelerate,
}


def export(facts: Facts, target: str) -> str:
    """The configuration text for `target`, one of `TARGETS`, with a newline at its end.

    Raises CannotExport (GA209) with every decision that the target cannot express.
    """
    text, refused = _exported(facts, target)
    if refused:
        reasons = tuple(one.reason for one in refused)
        raise CannotExport(target=target, plan=plan_name(facts.plan), reasons=reasons)
    return text


def refusals(facts: Facts, target: str) -> tuple[Refusal, ...]:
    """The decisions of the plan that `target` cannot express."""
    return _exported(facts, target)[1]


def _exported(facts: Facts, target: str) -> tuple[str, tuple[Refusal, ...]]:
    refused = Refused()
    text = TARGETS[target](facts, refused)
    return text, tuple(refused.refusals)
