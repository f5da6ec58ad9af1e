"""Parsers of values on the command line: counts and sizes in bytes."""

from __future__ import annotations

import argparse

from graphaccel.planner.cluster.cluster import parse_bytes


def positive(text: str) -> int:
    """An integer above 0. Raises argparse.ArgumentTypeError."""
    if not (text.isascii() and text.isdigit() and int(text)):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def byte_count(text: str) -> int:
    """Bytes from "80GiB". Raises argparse.ArgumentTypeError."""
    try:
        size = parse_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    if size == 0:
        raise argparse.ArgumentTypeError(f"{text!r} holds nothing")
    return size
