"""`graphaccel train`: trains a model of transformers on files, under a plan."""

from __future__ import annotations

import argparse
import os
import sys
from typing import Any

from graphaccel.cli.pin_options import add_pins, pins_of
from graphaccel.planner.plan.option_values import positive
from graphaccel.runtime.environment import join_job
from graphaccel.training.batch import batch_pins
from graphaccel.training.settings import add_settings, settings_of


def add_train(commands: Any) -> None:
    """Add the command and its options to the command line."""
    from pathlib import Path

    train = commands.add_parser(
        "train",
        help="train a language model or classifier on files, without a script",
        description="Train a model of transformers on files, on any number of devices. Nothing is "
        "downloaded: a model type gets random weights, a folder keeps its own.",
    )
    train.add_argument("--config", type=Path, metavar="FILE", help="YAML or TOML: these settings "
                       "and `pins`; what is typed here goes before it")  # fmt: skip
    train.add_argument("--devices", type=positive, metavar="N", help="processes on this machine")
    train.add_argument("--all-output", action="store_true", help="show what every rank prints")
    add_settings(train)
    train.add_argument(
        "--data-parallel", type=positive, metavar="N", help="the pin `data`: ranks of the batch"
    )
    add_pins(train, without=("data",))
    train.set_defaults(run_command=train_command)


def train_command(arguments: argparse.Namespace) -> int:
    """Train in this process, or start one for each device. Returns the exit code."""
    settings, pins = settings_of(arguments, arguments.config)
    pins |= pins_of(argparse.Namespace(**{**vars(arguments), "data": arguments.data_parallel}))
    join_job(restarts=arguments.devices is not None)
    world = os.environ.get("WORLD_SIZE")
    devices = (arguments.devices or 1) if world is None else int(world)
    from graphaccel.planner.plan.read_pins import check_alone

    # refused before processes start
    check_alone(pins, devices, settings.global_batch // settings.gradient_accumulation)
    batch_pins(settings, pins, devices)
    if devices > 1 and world is None:
        from graphaccel.runtime import launch
        from graphaccel.training.run import prepare

        prepare(settings)
        return launch.run_script(devices, sys.orig_argv[1:], (), arguments.all_output)
    from graphaccel.training.run import train

    metrics = train(settings, pins, devices)
    if os.environ.get("RANK", "0") == "0":
        for name, value in metrics.items():
            print(f"{name:24} {value:.6g}")
        print(f"the model is in {settings.output / 'model'}")
    return 0
