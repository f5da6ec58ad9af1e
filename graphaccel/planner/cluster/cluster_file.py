"""Reads and writes clusters as JSON files, for machines that are not in the catalogue.

The file is the output of `Cluster.to_json`. All errors in a file are collected and reported
together, each with its place in the file.
"""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, fields
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from graphaccel.errors import BadCluster
from graphaccel.planner.cluster.cluster import (
    COLLECTIVES,
    MOST_DEVICES,
    SCHEMA,
    Cluster,
    Collective,
    Device,
    Host,
    Link,
    OpTime,
    StepTime,
    too_many_devices,
)

_MAY_BE_ZERO = {
    "product_8_bits", "latency_seconds", "launch_seconds", "context_bytes", "fragmentation",
    "processors", "flops", "bytes", "rows", "columns", "inner", "compute", "communication",
    "optimizer", "optimizer_took",
}  # fmt: skip
_BOOLEAN = {"shared"}
_WHOLE = {"memory", "size", "count", "context_bytes", "processors", "devices"}
_SHARES = {"product", "product_8_bits", "attention", "attention_backward", "fragmentation"}
_MOST = 2**63 - 1  # bytes are added up as 64-bit integers
_DTYPES = frozenset(
    str(d).removeprefix("torch.") for d in vars(torch).values() if isinstance(d, torch.dtype)
) | {"tfloat32"}


def read_cluster(file: Path, devices: int | None = None) -> Cluster:
    """The cluster that a file describes, with `devices` devices where that is given.

    Raises BadCluster (GA602) with all errors in the file.
    """
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise BadCluster(where=str(file), problems=(error.strerror or str(error),)) from error
    except ValueError as error:
        raise BadCluster(where=str(file), problems=(f"it is no JSON: {error}",)) from error
    except RecursionError as error:
        raise BadCluster(where=str(file), problems=("it is nested too deeply",)) from error
    problems = tuple(_problems(data, devices))
    if problems:
        raise BadCluster(where=str(file), problems=problems)
    return Cluster.from_json(data if devices is None else {**data, "count": devices})


def write_cluster(cluster: Cluster, file: Path) -> None:
    """Write a cluster as `read_cluster` reads it."""
    file.write_text(json.dumps(cluster.to_json(), indent=1) + "\n", encoding="utf-8")


def _problems(data: Any, devices: int | None) -> Iterator[str]:
    if not isinstance(data, Mapping):
        yield "it is to be an object with device, count, links, context_bytes and fragmentation"
        return
    if data.get("schema", SCHEMA) != SCHEMA:
        yield f"schema is {data['schema']!r}; this version reads {SCHEMA}"
    results = list(_of_fields({k: v for k, v in data.items() if k != "schema"}, Cluster, ""))
    device = data.get("device")
    links: Any = data.get("links")
    if "device" in data:
        results += _of_device(device)
    if "links" in data:
        results += _of_links(links)
    if data.get("host") is not None:
        results += _of_host(data["host"])
    results += _of_regions(data.get("ort", {}))
    results += _of_steps(data.get("steps", []))
    yield from results
    if not results:
        count = data["count"] if devices is None else devices
        last = links[-1]
        if count > MOST_DEVICES:
            yield too_many_devices(count)
        elif last["size"] < count:
            yield (
                f"links[{len(links) - 1}].size is {last['size']}, and {count} devices are asked "
                "for: the last level reaches all of them"
            )


def _of_device(device: Any) -> Iterator[str]:
    if not isinstance(device, Mapping):
        yield "device is to be an object"
        return
    yield from _of_fields(device, Device, "device.")
    calls = device.get("measured", [])
    if not isinstance(calls, list):
        yield "device.measured is to be a list"
        calls = []
    for place, call in enumerate(calls):
        where = f"device.measured[{place}]"
        if not isinstance(call, Mapping):
            yield f"{where} is to be an object"
            continue
        yield from _of_fields(call, OpTime, f"{where}.")
        if "seconds" not in call:
            yield f"{where}.seconds is missing"
        if call.get("dtype"):
            yield from _of_dtype(call["dtype"], f"{where}.dtype")
    rates = device.get("peak_flops", {"float32": 1})
    if not isinstance(rates, Mapping) or "float32" not in rates:
        yield "device.peak_flops is to be an object of FLOP/s by dtype, with float32"
        return
    for dtype, rate in rates.items():
        yield from _of_dtype(dtype, f"device.peak_flops.{dtype}")
        yield from _of_number(rate, "rate", f"device.peak_flops.{dtype}")


def _of_dtype(name: Any, where: str) -> Iterator[str]:
    if isinstance(name, str) and name not in _DTYPES:
        near = difflib.get_close_matches(name, sorted(_DTYPES), 1)
        meant = f"; there is {near[0]}" if near else ""
        yield f"{where} is no dtype of torch{meant}"


def _of_regions(builds: Any) -> Iterator[str]:
    """Errors in the times that `graphaccel calibrate --ort` measured."""
    if not isinstance(builds, Mapping):
        yield "ort is to be an object of what was measured, by build of ONNX Runtime"
        return
    for build, regions in builds.items():
        if not isinstance(regions, Mapping):
            yield f"ort[{build!r}] is to be an object of seconds by region"
            continue
        for region, pair in regions.items():
            where = f"ort[{build!r}][{region!r}]"
            if not isinstance(pair, list) or len(pair) != 2:
                yield f"{where} is to be a list of two: seconds of torch, and of ONNX Runtime"
                continue
            for value in pair:
                yield from _of_number(value, "seconds", where)


def _of_steps(steps: Any) -> Iterator[str]:
    """Errors in the steps that `graphaccel plan --measure N --refine FILE` measured."""
    if not isinstance(steps, list):
        yield "steps is to be a list"
        return
    for place, step in enumerate(steps):
        if isinstance(step, Mapping):
            yield from _of_fields(step, StepTime, f"steps[{place}].")
        else:
            yield f"steps[{place}] is to be an object"


def _of_host(host: Any) -> Iterator[str]:
    if isinstance(host, Mapping):
        yield from _of_fields(host, Host, "host.")
    else:
        yield "host is to be an object"


def _of_links(links: Any) -> Iterator[str]:
    if not isinstance(links, list) or not links:
        yield "links is to be a list of at least one level, from the innermost outwards"
        return
    sizes: list[tuple[int, float]] = []
    for place, link in enumerate(links):
        if not isinstance(link, Mapping):
            yield f"links[{place}] is to be an object"
            continue
        yield from _of_fields(link, Link, f"links[{place}].")
        yield from _of_collectives(link.get("measured", []), f"links[{place}].measured")
        size = link.get("size")
        if isinstance(size, int) and size > 0:
            sizes.append((place, size))
    for (_, inner), (place, outer) in pairwise(sizes):
        if outer <= inner:
            yield (
                f"links[{place}].size is {outer}, and the level inside it has {inner}: levels grow "
                "outwards"
            )
        elif outer % inner:
            yield (
                f"links[{place}].size is {outer}, and the level inside it has {inner}: a level is "
                f"made of whole ones of those inside, as {outer + -outer % inner} would be; "
                "count may be less"
            )


def _of_collectives(rows: Any, where: str) -> Iterator[str]:
    if not isinstance(rows, list):
        yield f"{where} is to be a list"
        return
    seen: list[Any] = []
    for place, row in enumerate(rows):
        if not isinstance(row, Mapping):
            yield f"{where}[{place}] is to be an object"
            continue
        yield from _of_fields(row, Collective, f"{where}[{place}].")
        name = row.get("name")
        if name in seen:
            yield f"{where} has {name} more than once"
        elif isinstance(name, str) and name and name not in COLLECTIVES:
            yield f"{where}[{place}].name is {name!r}; there are {', '.join(COLLECTIVES)}"
        seen += [name] if name in COLLECTIVES else []


def _of_fields(data: Mapping[str, Any], kind: type, where: str) -> Iterator[str]:
    names = [f.name for f in fields(kind) if f.name != "refined_by"]
    needed = {f.name for f in fields(kind) if f.default is MISSING}
    for name in names:
        if kind is Cluster and name in ("ort", "host", "steps"):
            continue  # checked by functions of their own
        if name not in data:
            if name in needed:
                yield f"{where}{name} is missing"
        elif name in ("name", "op", "dtype", "model", "precision", "plan", "stands_for"):
            empty = name in ("dtype", "stands_for")
            if not isinstance(data[name], str) or not (data[name] or empty):
                yield f"{where}{name} is to be a text"
        elif name in _BOOLEAN:
            if not isinstance(data[name], bool):
                yield f"{where}{name} is to be true or false"
        elif name not in ("device", "links", "peak_flops", "measured"):
            yield from _of_number(data[name], name, f"{where}{name}")
    for name in data:
        if name not in names:
            yield f"{where}{name} is unknown; there are {', '.join(names)}"


def _of_number(value: Any, name: str, where: str) -> Iterator[str]:
    kind = "whole number" if name in _WHOLE else "number"
    if isinstance(value, bool) or not isinstance(value, int if name in _WHOLE else (int, float)):
        yield f"{where} is {value!r}: it is a {kind}"
    elif isinstance(value, int) and abs(value) > _MOST:
        yield f"{where} is a number of {len(str(abs(value)))} digits: it is at most {_MOST}"
    elif not math.isfinite(value):
        yield f"{where} is {value!r}: it is a {kind}"
    elif value < 0 or (value == 0 and name not in _MAY_BE_ZERO):
        least = "at least 0" if name in _MAY_BE_ZERO else "above 0"
        yield f"{where} is {value:g}: it is {least}"
    elif value > 1 and name in _SHARES:
        yield f"{where} is {value:g}: it is a share, at most 1"
