"""Devices and links that can not be planned for: class, full text, nothing half done."""

# ruff: noqa: E501 (texts are asserted as they are printed)

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import graphaccel
from graphaccel import errors
from graphaccel.planner.cluster.catalogue import cluster
from graphaccel.planner.cluster.cluster import Collective
from graphaccel.planner.cluster.cluster_file import read_cluster, write_cluster
from tests.support.small import Classifier, small_batch

HELP = """\
  why:  times and memory are predicted from these figures
  help: start from a known device:  graphaccel plan FILE --devices N --device h100-80gb --save-cluster cluster.json
  explain: graphaccel explain GA602"""


def test_a_saved_cluster_is_read_back(tmp_path: Path) -> None:
    file = tmp_path / "c.json"
    write_cluster(cluster("h100-80gb", 64), file)
    assert read_cluster(file) == cluster("h100-80gb", 64)
    assert read_cluster(file, 16).count == 16


def test_collectives_are_read_back_and_files_without_them_are_read(tmp_path: Path) -> None:
    plain = cluster("h100-80gb", 64)
    rows = Collective("reduce-scatter", 1e-4, 2e9), Collective("all-to-all", 0.0, 1e9)
    made = replace(plain, links=(replace(plain.links[0], measured=rows), *plain.links[1:]))
    file = tmp_path / "c.json"
    write_cluster(made, file)
    assert read_cluster(file) == made
    data = made.to_json()
    for link in data["links"]:
        del link["measured"]
    file.write_text(json.dumps(data))
    assert read_cluster(file) == plain


def _changed(path: str, value: Any) -> dict[str, Any]:
    """The file of 16 x h100-80gb with one place changed; Ellipsis: left out."""
    data = copy.deepcopy(cluster("h100-80gb", 16).to_json())
    place: Any = data
    *steps, last = [int(s) if s.isdecimal() else s for s in path.split(".")]
    for step in steps:
        place = place[step]
    if value is ...:
        del place[last]
    else:
        place[last] = value
    return data


@pytest.mark.parametrize(
    ("path", "value", "problem"),
    [
        ("links", ..., "links is missing"),
        ("links", [], "links is to be a list of at least one level, from the innermost outwards"),
        ("links.0.bandwidth", ..., "links[0].bandwidth is missing"),
        ("links.0.bandwidth", 0, "links[0].bandwidth is 0: it is above 0"),
        ("links.1.latency_seconds", -1e-6, "links[1].latency_seconds is -1e-06: it is at least 0"),
        ("links.1.size", 8, "links[1].size is 8, and the level inside it has 8: levels grow outwards"),
        ("links.1.size", 12, "links[1].size is 12, and the level inside it has 8: a level is made of whole ones of those inside, as 16 would be; count may be less"),
        ("links.0.size", 5, "links[1].size is 16, and the level inside it has 5: a level is made of whole ones of those inside, as 20 would be; count may be less"),
        ("count", 32, "links[1].size is 16, and 32 devices are asked for: the last level reaches all of them"),
        ("links.0", "NVLink", "links[0] is to be an object"),
        ("links.0.measured", {}, "links[0].measured is to be a list"),
        ("links.0.measured", [3], "links[0].measured[0] is to be an object"),
        ("links.0.measured", [{"name": "gossip", "latency_seconds": 0, "bandwidth": 1}], "links[0].measured[0].name is 'gossip'; there are reduce-scatter, all-gather, all-to-all"),
        ("links.0.measured", [{"name": "all-gather", "latency_seconds": -1, "bandwidth": 1}], "links[0].measured[0].latency_seconds is -1: it is at least 0"),
        ("links.1.measured", [{"name": "all-gather", "latency_seconds": 0, "bandwidth": 0}], "links[1].measured[0].bandwidth is 0: it is above 0"),
        ("links.0.measured", [{"name": "all-gather", "bandwidth": 1}], "links[0].measured[0].latency_seconds is missing"),
        ("links.0.measured", [{"name": "all-gather", "latency_seconds": 0, "bandwidth": 1}] * 2, "links[0].measured has all-gather more than once"),
        ("device.memory", -5, "device.memory is -5: it is above 0"),
        ("device.memory", 1.5, "device.memory is 1.5: it is a whole number"),
        ("device.peak_flops.float32", 0, "device.peak_flops.float32 is 0: it is above 0"),
        ("device.peak_flops.float32", ..., "device.peak_flops is to be an object of FLOP/s by dtype, with float32"),
        ("device.launch_seconds", "fast", "device.launch_seconds is 'fast': it is a number"),
        ("device.colour", "green", "device.colour is unknown; there are name, memory, peak_flops, memory_bandwidth, launch_seconds, processors, product, attention, attention_backward, measured, crowd, stepping, product_8_bits, stands_for"),
        ("device.measured", 7, "device.measured is to be a list"),
        ("device.measured", [{"op": "product", "seconds": -1}], "device.measured[0].seconds is -1: it is above 0"),
        ("device.measured", [{"op": "product", "seconds": 0}], "device.measured[0].seconds is 0: it is above 0"),
        ("device.measured", [{"op": "product"}], "device.measured[0].seconds is missing"),
        ("device.measured", [{"op": "product", "dtype": "float23", "seconds": 1}], "device.measured[0].dtype is no dtype of torch; there is float32"),
        ("device.measured", [{"seconds": 1e-3}], "device.measured[0].op is missing"),
        ("device.peak_flops.bfloat61", 1e12, "device.peak_flops.bfloat61 is no dtype of torch; there is bfloat16"),
        ("device.peak_flops.quick", 1e12, "device.peak_flops.quick is no dtype of torch"),
        ("device.peak_flops.bfloat16", 10**400, "device.peak_flops.bfloat16 is a number of 401 digits: it is at most 9223372036854775807"),
        ("device.memory", 10**400, "device.memory is a number of 401 digits: it is at most 9223372036854775807"),
        ("device.product", 700, "device.product is 700: it is a share, at most 1"),
        ("device.attention", 1.5, "device.attention is 1.5: it is a share, at most 1"),
        ("device.name", "", "device.name is to be a text"),
        ("device", 3, "device is to be an object"),
        ("host", 3, "host is to be an object"),
        ("host.link", ..., "host.link is missing"),
        ("host.memory", 0, "host.memory is 0: it is above 0"),
        ("host.shared", 1, "host.shared is to be true or false"),
        ("host.disk", 1, "host.disk is unknown; there are memory, memory_bandwidth, link, shared"),
        ("count", 0, "count is 0: it is above 0"),
        ("count", 10**12, "a cluster has at most 1048576 devices, not 1000000000000"),
        ("count", True, "count is True: it is a whole number"),
        ("ort", 5, "ort is to be an object of what was measured, by build of ONNX Runtime"),
        ("ort", {"b": []}, "ort['b'] is to be an object of seconds by region"),
        ("ort", {"b": {"r": 1}}, "ort['b']['r'] is to be a list of two: seconds of torch, and of ONNX Runtime"),
        ("ort", {"b": {"r": [1, "x"]}}, "ort['b']['r'] is 'x': it is a number"),
        ("fragmentation", 50, "fragmentation is 50: it is a share, at most 1"),
        ("fragmentation", float("nan"), "fragmentation is nan: it is a number"),
    ],
)  # fmt: skip
def test_a_cluster_file_that_can_not_be(
    tmp_path: Path, path: str, value: Any, problem: str
) -> None:
    file = tmp_path / "c.json"
    file.write_text(json.dumps(_changed(path, value)))
    with pytest.raises(errors.BadCluster) as caught:
        read_cluster(file)
    assert str(caught.value) == f"error[GA602]: {file} describes no cluster\n  {problem}\n{HELP}"


@pytest.mark.parametrize("count", [9, 12, 20])
def test_a_cluster_of_nodes_that_are_not_all_full_is_read_back(tmp_path: Path, count: int) -> None:
    file = tmp_path / "c.json"
    write_cluster(cluster("h100-80gb", count), file)
    assert read_cluster(file) == cluster("h100-80gb", count)


def test_all_that_is_wrong_is_said_at_once(tmp_path: Path) -> None:
    data = _changed("device.memory", 0)
    del data["context_bytes"]
    data["links"][1]["size"] = 4
    file = tmp_path / "c.json"
    file.write_text(json.dumps(data))
    with pytest.raises(errors.BadCluster) as caught:
        read_cluster(file)
    assert caught.value.problems == (
        "context_bytes is missing",
        "device.memory is 0: it is above 0",
        "links[1].size is 4, and the level inside it has 8: levels grow outwards",
    )


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (None, "No such file or directory"),
        ("{", "it is no JSON: Expecting property name enclosed in double quotes: line 1 column 2 (char 1)"),
        ("3", "it is to be an object with device, count, links, context_bytes and fragmentation"),
    ],
)  # fmt: skip
def test_a_file_that_is_no_cluster(tmp_path: Path, content: str | None, problem: str) -> None:
    file = tmp_path / "c.json"
    if content is not None:
        file.write_text(content)
    with pytest.raises(errors.BadCluster) as caught:
        read_cluster(file)
    assert caught.value.problems == (problem,)


def test_more_devices_than_the_file_links(tmp_path: Path) -> None:
    file = tmp_path / "c.json"
    write_cluster(cluster("h100-80gb", 16), file)
    with pytest.raises(errors.BadCluster) as caught:
        read_cluster(file, 32)
    (problem,) = caught.value.problems
    assert problem.startswith("links[1].size is 16, and 32 devices are asked for")


def test_a_count_that_is_not_asked_for_does_not_matter(tmp_path: Path) -> None:
    file = tmp_path / "c.json"
    file.write_text(json.dumps(_changed("count", 10**12)))
    assert read_cluster(file, 16) == cluster("h100-80gb", 16)


@pytest.mark.parametrize(
    ("devices", "memory", "problems"),
    [
        (0, None, ("a cluster needs at least one device, not 0",)),
        (-2, None, ("a cluster needs at least one device, not -2",)),
        (2**20 + 1, None, ("a cluster has at most 1048576 devices, not 1048577",)),
        (10**12, -1, ("a cluster has at most 1048576 devices, not 1000000000000", "a memory of -1 bytes holds nothing")),
        (2, 0, ("a memory of 0 bytes holds nothing",)),
        (2, -1, ("a memory of -1 bytes holds nothing",)),
        (0, -1, ("a cluster needs at least one device, not 0", "a memory of -1 bytes holds nothing")),
    ],
)  # fmt: skip
def test_devices_that_can_not_be(
    devices: int, memory: int | None, problems: tuple[str, ...]
) -> None:
    with pytest.raises(errors.BadCluster) as caught:
        graphaccel.plan(Classifier(), small_batch(), devices=devices, memory=memory)
    assert caught.value.where == f"{devices} x cpu"
    assert caught.value.problems == problems


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("H100", "  help: did you mean:  --device h100-80gb\n  help: did you mean:  --device v100-32gb\n  help: did you mean:  --device v100-16gb\n"),
        ("?", "  help: there are:  cpu, v100-32gb, v100-16gb, a100-40gb, a100-80gb, h100-80gb, h200-141gb, b200-192gb, b300-288gb, gb200-192gb, gb300-288gb, rtx4090-24gb, rtx5090-32gb, rtx3090-24gb, a6000-48gb, l40s-48gb, l4-24gb, t4-16gb\n"),
    ],
)  # fmt: skip
def test_an_unknown_device(name: str, advice: str) -> None:
    with pytest.raises(errors.UnknownDevice) as caught:
        graphaccel.plan(Classifier(), small_batch(), devices=1, device=name)
    text = f"error[GA601]: no device named `{name}` in the catalogue\n{advice}"
    assert str(caught.value) == f"{text}  explain: graphaccel explain GA601"


@pytest.mark.parametrize(("devices", "batches"), [(64, "32, 64"), (2**20, "524288, 1048576")])
def test_a_batch_that_no_number_of_devices_divides(devices: int, batches: str) -> None:
    with pytest.raises(errors.BatchNotDivisible) as caught:
        graphaccel.plan(Classifier(), small_batch(7), devices=devices)
    assert str(caught.value) == (
        f"error[GA206]: a batch of 7 can not be shared by {devices} devices\n"
        "  why:  no data axis divides both, and the graph has too few stages for a pipeline of all devices\n"
        "  help: use another number of devices:  2, 7, 14\n"
        f"  help: or another global batch:  {batches}\n"
        "  explain: graphaccel explain GA206"
    )


def test_groups_of_devices_that_are_too_large_for_a_pipeline() -> None:
    """Nobody asked for 125 stages; the help lines work as they are."""
    with pytest.raises(errors.BatchNotDivisible) as caught:
        graphaccel.plan(Classifier(), small_batch(8), devices=1000)
    assert str(caught.value) == (
        "error[GA206]: a batch of 8 can not be shared by 1000 devices\n"
        "  why:  the largest data axis that divides both is 8, and the graph can be cut into 2 stages, not into the 125 that are left\n"
        "  help: use another number of devices:  4, 8, 16\n"
        "  help: or another global batch:  500, 1000\n"
        "  explain: graphaccel explain GA206"
    )
    for devices in caught.value.devices:
        assert graphaccel.plan(Classifier(), small_batch(8), devices=devices).devices == devices
