"""The catalogue of devices, and communication times against formulae worked by hand."""

import json
import os
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import graphaccel
from graphaccel.api import cluster_here
from graphaccel.errors import UnknownDevice
from graphaccel.planner.cluster.catalogue import cluster, device_names
from graphaccel.planner.cluster.cluster import (
    COLLECTIVES,
    GIB,
    Cluster,
    Collective,
    Device,
    Link,
    parse_bytes,
)
from graphaccel.planner.cluster.communication import (
    INTERFERENCE,
    all_gather_seconds,
    all_reduce_seconds,
    all_to_all_seconds,
    exposed_seconds,
    reduce_scatter_seconds,
    send_seconds,
)
from graphaccel.planner.cluster.detect import DetectedDevice, detected_cluster
from graphaccel.planner.plan.plan import Plan
from graphaccel.planner.profile.axis_rates import axis_rates

# Two nodes and more of four devices: 10 bytes/s at 1 s a hop inside, 2 bytes/s at 3 s outside.
DEVICE = Device("toy", 1000, {"float32": 1.0}, 1.0, 0.5)
INNER, OUTER = Link("inner", 1.0, 10.0, 4), Link("outer", 3.0, 2.0, 64)
TOY = Cluster(DEVICE, 64, (INNER, OUTER), context_bytes=0, fragmentation=0.0)


@pytest.mark.parametrize("name", device_names())
@pytest.mark.parametrize("count", [1, 8, 64])
def test_catalogue_entries_are_sane_and_survive_json(name, count):
    entry = cluster(name, count)
    assert Cluster.from_json(json.loads(json.dumps(entry.to_json()))) == entry
    assert len({entry, cluster(name, count)}) == 1
    assert entry.count == count
    assert entry.links[-1].size >= count
    assert list(entry.links) == sorted(entry.links, key=lambda link: -link.bandwidth)
    device = entry.device
    assert device.name == name
    assert {"float32", "float64", "float16"} <= set(device.peak_flops)
    assert all(rate > 0 for rate in device.peak_flops.values())
    assert entry.tensor_budget < device.memory


@pytest.mark.parametrize("name", [name for name in device_names() if name != "cpu"])
def test_memory_is_close_below_the_names(name):
    claimed = int(name.split("-")[1].removesuffix("gb"))
    assert 0.92 * claimed * 1e9 < cluster(name, 1).device.memory < claimed * GIB


def test_only_one_node_needs_no_network():
    assert [link.name for link in cluster("h100-80gb", 8).links] == ["NVLink 4"]
    assert [link.name for link in cluster("H100-80GB", 9).links] == ["NVLink 4", "InfiniBand NDR"]


@pytest.mark.parametrize("name", ["gb200-192gb", "gb300-288gb"])
def test_a_rack_is_one_domain_of_nvlink(name):
    assert [link.size for link in cluster(name, 72).links] == [72]
    assert [link.size for link in cluster(name, 256).links] == [72, 288]
    assert cluster(name, 256).links[1].bandwidth < cluster(name, 72).links[0].bandwidth / 6


def test_what_blackwell_is_ahead_by():
    """Of the Blackwell Ultra datasheet: in 4 bits half as much again, not more in others."""
    for board, ultra in (("b200-192gb", "b300-288gb"), ("gb200-192gb", "gb300-288gb")):
        old, new = (cluster(name, 1).device.peak_flops for name in (board, ultra))
        assert new["float4_e2m1fn_x2"] == 1.5 * old["float4_e2m1fn_x2"]
        assert new["bfloat16"] == old["bfloat16"] == old["float8_e4m3fn"] / 2
        assert cluster(ultra, 1).device.memory > 1.49 * cluster(board, 1).device.memory


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("NVIDIA GB300", "gb300-288gb"),
        ("NVIDIA GB200", "gb200-192gb"),
        ("NVIDIA B300 SXM6 AC", "b300-288gb"),
        ("NVIDIA B200", "b200-192gb"),
        ("NVIDIA H100 80GB HBM3", "h100-80gb"),
        ("NVIDIA A100-SXM4-40GB", "a100-40gb"),
        ("NVIDIA A100-SXM4-80GB", "a100-80gb"),
        ("NVIDIA L40S", "l40s-48gb"),
        ("NVIDIA L4", "l4-24gb"),
        ("Tesla T4", "t4-16gb"),
        ("NVIDIA RTX A6000", "a6000-48gb"),
        ("NVIDIA GeForce RTX 4090", "rtx4090-24gb"),
    ],
)
def test_the_driver_s_name_finds_the_entry(name, known, monkeypatch):
    entry = cluster(known, 2).device
    found = SimpleNamespace(
        name=name,
        total_memory=entry.memory - GIB,
        multi_processor_count=entry.processors,
        major=0,
        minor=0,
    )
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: found)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    device = cluster_here(2, torch.device("cuda", 0)).device
    assert device == replace(entry, memory=entry.memory - GIB)


@pytest.mark.parametrize(
    ("found", "known"),
    [
        (DetectedDevice("NVIDIA H100 PCIe", 80 * GIB, 114, (9, 0)), "h100-80gb"),
        (DetectedDevice("NVIDIA GH200 480GB", 95 * GIB, 132, (9, 0)), "h100-80gb"),
        (DetectedDevice("NVIDIA A10G", 22 * GIB, 80, (8, 6)), "rtx3090-24gb"),
        (DetectedDevice("NVIDIA RTX 6000 Ada Generation", 48 * GIB, 142, (8, 9)), "l40s-48gb"),
        (DetectedDevice("Quadro RTX 5000", 16 * GIB, 48, (7, 5)), "t4-16gb"),
        (DetectedDevice("Tesla P100-PCIE-16GB", 16 * GIB, 56, (6, 0)), "v100-16gb"),
    ],
)
def test_an_unknown_gpu_is_the_nearest_of_the_catalogue_by_its_processors(found, known):
    device, entry = detected_cluster(found, 2).device, cluster(known, 2).device
    share = found.processors / entry.processors
    assert (device.name, device.memory, device.stands_for) == (known, found.memory, found.name)
    assert device.peak_flops["float32"] == pytest.approx(share * entry.peak_flops["float32"])
    assert device.memory_bandwidth == pytest.approx(share * entry.memory_bandwidth)
    assert device.processors == found.processors


def test_every_gpu_of_the_catalogue_can_be_found():
    for name in device_names():
        entry = cluster(name, 1).device
        if entry.type == "cuda":
            words = name.replace("rtx", "GeForce RTX ")
            found = DetectedDevice(f"NVIDIA {words}", entry.memory, entry.processors, (0, 0))
            assert detected_cluster(found, 1).device == entry


def test_a_plan_says_whose_rates_it_is_made_with():
    found = DetectedDevice("Quadro RTX 5000", 16 * GIB, 48, (7, 5))
    model, batch = torch.nn.Linear(4, 4), {"input": torch.randn(2, 4)}
    notes = [
        graphaccel.plan(model, batch, devices=1, cluster=where).notes
        for where in (detected_cluster(found, 1), cluster("t4-16gb", 1))
    ]
    said = (
        "the rates of Quadro RTX 5000 are taken to be those of t4-16gb by its 48 processors; "
        "`graphaccel calibrate` measures them"
    )
    assert [said in each for each in notes] == [True, False]


def test_v100_has_no_bfloat16():
    assert "bfloat16" not in cluster("v100-32gb", 1).device.peak_flops


def test_cpu_processes_share_the_host():
    one, four = cluster("cpu", 1).device, cluster("cpu", 4).device
    assert four.memory == one.memory // 4
    assert four.peak_flops["float32"] == pytest.approx(one.peak_flops["float32"] / 4)
    assert four.memory_bandwidth == pytest.approx(one.memory_bandwidth / 4)
    assert one.memory <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def test_memory_can_be_set_and_the_budget_leaves_room():
    entry = cluster("a100-80gb", 2, memory=10 * GIB)
    assert entry.device.memory == 10 * GIB
    assert entry.tensor_budget == int((10 * GIB - entry.context_bytes) / (1 + entry.fragmentation))
    assert cluster("a100-80gb", 2, memory=1).tensor_budget == 0


def test_an_unknown_device_names_the_closest():
    with pytest.raises(UnknownDevice) as caught:
        cluster("h100", 8)
    assert caught.value.name == "h100"
    assert caught.value.closest[0] == "h100-80gb"


@pytest.mark.parametrize(
    ("links", "count", "message"),
    [
        ((INNER,), 5, "the last link level holds 4 of 5 devices"),
        ((OUTER, INNER), 4, "link levels must grow outwards"),
        ((), 1, "link levels must grow outwards"),
        ((INNER, replace(OUTER, size=6), OUTER), 4, "hold whole ones of the last, not .4, 6, 64."),
        ((INNER,), 0, "at least one device, not 0"),
        ((replace(OUTER, size=2**21),), 2**21, "at most 1048576 devices, not 2097152"),
    ],
)
def test_impossible_clusters_are_refused(links, count, message):
    with pytest.raises(ValueError, match=message):
        Cluster(DEVICE, count, links, 0, 0.0)


@pytest.mark.parametrize("change", [{"links": [{"speed": 1}]}, {"device": {}}, {"colour": "red"}])
def test_other_json_is_refused(change):
    with pytest.raises(ValueError, match="this is no cluster description"):
        Cluster.from_json(TOY.to_json() | change)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("80GiB", 80 * 2**30),
        ("80gib", 80 * 2**30),
        ("24 GB", 24 * 10**9),
        ("1.5MiB", 3 * 2**19),
        ("512KB", 512_000),
        ("2TiB", 2**41),
        ("4096", 4096),
        ("7B", 7),
    ],
)
def test_amounts_of_memory(text, size):
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["80G", "GiB", "-1GiB", "", "80GiBs", "1e9"])
def test_other_amounts_are_refused(text):
    with pytest.raises(ValueError, match="is no amount of memory"):
        parse_bytes(text)


def test_ring_inside_a_node():
    # 3 hops of 1 s; 3/4 of 400 bytes at 10 bytes/s; one launch.
    assert reduce_scatter_seconds(TOY, 400, 4) == pytest.approx(0.5 + 3 * 1 + 300 / 10)
    assert all_gather_seconds(TOY, 400, 4) == reduce_scatter_seconds(TOY, 400, 4)
    assert all_reduce_seconds(TOY, 400, 4) == pytest.approx(0.5 + 2 * (3 * 1 + 300 / 10))


def test_ring_over_nodes_shares_their_ports():
    # 16 devices on 4 nodes: 12 hops inside, 3 outside; four ports per node at 2 bytes/s each.
    seconds = 0.5 + 12 * 1 + 3 * 3 + 1600 * 15 / 16 / 4 / 2
    assert reduce_scatter_seconds(TOY, 1600, 16) == pytest.approx(seconds)


def test_ring_over_one_device_per_node():
    seconds = 0.5 + 3 * 3 + 400 * 3 / 4 / 2
    assert reduce_scatter_seconds(TOY, 400, 4, stride=4) == pytest.approx(seconds)
    # Two devices apart: two members per node of four.
    seconds = 0.5 + 2 * 1 + 1 * 3 + 400 * 3 / 4 / 2 / 2
    assert reduce_scatter_seconds(TOY, 400, 4, stride=2) == pytest.approx(seconds)


def test_groups_across_the_borders_of_nodes_pay_for_the_way_between_them():
    # Of 3 in nodes of 4 the second group has 1 and 2: 2 hops of 3 s; 2/3 of 300 at 2 bytes/s.
    assert reduce_scatter_seconds(TOY, 300, 3) == pytest.approx(0.5 + 2 * 3 + 200 / 2)
    # Of 6 some have 4 and 2: 3 hops inside, 2 outside; 5/6 of 600 through 2 ports each.
    assert reduce_scatter_seconds(TOY, 600, 6) == pytest.approx(0.5 + 3 * 1 + 2 * 3 + 500 / 2 / 2)
    # Nodes of 5 of 16 devices, which a file may not have: 4 of them are no node's.
    five = replace(TOY, count=16, links=(replace(INNER, size=5), replace(OUTER, size=16)))
    assert reduce_scatter_seconds(five, 400, 4) == reduce_scatter_seconds(TOY, 400, 4, 16)


def test_placements_are_priced_on_links_that_every_group_has():
    rates = [axis_rates(TOY, Plan(64, tensor=n), "tensor").bandwidth for n in (2, 3, 4, 8)]
    assert rates == [10.0, 2.0, 10.0, 2.0]


def test_tree_wins_for_small_messages_over_many_nodes():
    # 64 devices on 16 nodes: 3 hops inside, log2(16) outside, up and down.
    tree = 0.5 + 2 * (3 * 1 + 4 * 3) + 2 * max(8 / 10, 8 / 4 / 2) / 0.92
    ring = 0.5 + 2 * (48 * 1 + 15 * 3 + 8 * 63 / 64 / 4 / 2)
    assert all_reduce_seconds(TOY, 8, 64) == pytest.approx(tree)
    assert tree < ring
    large = 0.5 + 2 * (48 * 1 + 15 * 3 + 1e6 * 63 / 64 / 4 / 2)
    assert all_reduce_seconds(TOY, 1e6, 64) == pytest.approx(large)


def test_tree_over_one_device_per_node_has_no_chain():
    tree = 0.5 + 2 * 4 * 3 + 2 * 8 / 2 / 0.92
    assert all_reduce_seconds(TOY, 8, 16, stride=4) == pytest.approx(tree)


def test_gloo_has_the_ring_only():
    link = Link("loopback", 1.0, 10.0, 16)
    host = Cluster(Device("cpu", 1000, {}, 1.0, 0.0), 16, (link,), 0, 0.0)
    assert all_reduce_seconds(host, 1, 16) == pytest.approx(2 * (15 + 15 / 16 / 10))


def test_all_to_all_splits_its_bytes_over_the_levels():
    # 3 partners inside, 12 outside, 1/16 of 1600 bytes for each.
    assert all_to_all_seconds(TOY, 1600, 16) == pytest.approx(0.5 + 3 * 1 + 12 * 3 + 1200 / 2)
    assert all_to_all_seconds(TOY, 400, 4) == pytest.approx(0.5 + 3 * 1 + 300 / 10)


def test_a_message_takes_the_innermost_common_level():
    assert send_seconds(TOY, 100, 0, 3) == pytest.approx(0.5 + 1 + 10)
    assert send_seconds(TOY, 100, 3, 4) == pytest.approx(0.5 + 3 + 50)
    assert send_seconds(TOY, 100, 5, 5) == 0
    with pytest.raises(ValueError, match="device 64 is not among the 64"):
        send_seconds(TOY, 100, 0, 64)


@pytest.mark.parametrize(("size", "stride"), [(65, 1), (17, 4), (0, 1), (2, 0)])
def test_groups_that_do_not_fit_are_refused(size, stride):
    with pytest.raises(ValueError, match="does not fit 64 devices"):
        all_reduce_seconds(TOY, 1, size, stride)


@given(
    name=st.sampled_from(device_names()),
    size=st.integers(0, 10**10),
    more=st.integers(0, 10**10),
    group=st.integers(1, 64),
    stride=st.sampled_from([1, 2, 8]),
)
def test_times_grow_with_bytes_and_a_lone_device_waits_for_nobody(name, size, more, group, stride):
    entry = cluster(name, 64 * 8)
    for seconds in (all_reduce_seconds, reduce_scatter_seconds, all_to_all_seconds):
        took = seconds(entry, size, group, stride)
        assert took == 0 if group == 1 or size == 0 else took > 0
        assert seconds(entry, size + more, group, stride) >= took


OF_TOY = {
    "reduce-scatter": reduce_scatter_seconds,
    "all-gather": all_gather_seconds,
    "all-to-all": all_to_all_seconds,
}


@pytest.mark.parametrize("name", COLLECTIVES)
def test_a_measured_collective_has_its_own_rates_and_the_others_the_links(name):
    inner = replace(INNER, measured=(Collective(name, 2.0, 5.0),))
    made = replace(TOY, links=(inner, OUTER))
    assert OF_TOY[name](made, 400, 4) == pytest.approx(0.5 + 3 * 2 + 300 / 5)
    for other in COLLECTIVES:
        if other != name:
            assert OF_TOY[other](made, 400, 4) == OF_TOY[other](TOY, 400, 4)
    assert all_reduce_seconds(made, 400, 4) == all_reduce_seconds(TOY, 400, 4)
    assert send_seconds(made, 400, 0, 1) == send_seconds(TOY, 400, 0, 1)


def test_a_level_on_which_nothing_was_measured_keeps_its_rates():
    inner = replace(INNER, measured=(Collective("reduce-scatter", 2.0, 5.0),))
    made = replace(TOY, links=(inner, OUTER))
    outside = reduce_scatter_seconds(made, 400, 4, stride=4)
    assert outside == reduce_scatter_seconds(TOY, 400, 4, stride=4)
    hops = 12 * 2 + 3 * 3  # of 16 around two levels: 12 inside
    slowest = max(1500 / 5, 1500 / 4 / 2)
    assert reduce_scatter_seconds(made, 1600, 16) == pytest.approx(0.5 + hops + slowest)


@given(
    st.lists(st.sampled_from(COLLECTIVES), unique=True),
    st.floats(0, 1e3),
    st.floats(0, 1e12, exclude_min=True),
)
def test_measured_collectives_survive_json(names, latency, bandwidth):
    rows = tuple(Collective(name, latency, bandwidth) for name in names)
    made = replace(TOY, links=(INNER, replace(OUTER, measured=rows)))
    assert Cluster.from_json(json.loads(json.dumps(made.to_json()))) == made
    assert hash(made)


def test_hosts_are_slower_than_their_devices_and_shared_by_them():
    for name in device_names():
        entry = cluster(name, 8)
        assert 0 < entry.host.link <= entry.host.memory_bandwidth <= entry.device.memory_bandwidth
        assert entry.host.memory < 2**41 / 8
        assert entry.host.shared == (name == "cpu")
    assert cluster("cpu", 4).host.memory == cluster("cpu", 4).device.memory
    assert cluster("h100-80gb", 1).host.link == pytest.approx(0.8 * 63e9)


def test_a_description_without_a_host_is_read():
    plain = cluster("a100-80gb", 2).to_json()
    del plain["host"]
    assert Cluster.from_json(plain).host is None


@pytest.mark.parametrize("beside", [0.0, 0.5, 2.0, 100.0])
def test_what_hides_slows_down_and_grows(beside: float) -> None:
    """One piece never hides; the rest costs its interference, or what the phase is too short for.
    No bound of it (`LeastMoved.exposed`) is above it, and more takes no less."""
    device = cluster("h100-80gb", 1).device
    before = 0.0
    for moved in (0.25, 0.5, 1.0, 2.0, 4.0, 8.0):
        found = exposed_seconds(device, moved, 0.25, beside)
        assert max(INTERFERENCE * moved, moved - beside, before) <= found <= moved + 1e-12
        before = found
    assert exposed_seconds(device, 1.0, 0.25, 100.0) == 0.25 + INTERFERENCE * 0.75
    assert exposed_seconds(device, 1.0, 0.25, 0.5) == 1.0 - 0.75 * 0.5
    assert exposed_seconds(cluster("cpu", 1).device, 1.0, 0.25, beside) == 1.0
    assert exposed_seconds(device, 0.0, 0.0, beside) == 0.0
