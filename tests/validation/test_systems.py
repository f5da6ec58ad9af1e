"""What systems of published runs do otherwise: what they join, gather and make again."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from benchmarks.validation.joined import joined_works
from benchmarks.validation.predict import Predicted, Predictor, cluster_of, real_cluster
from benchmarks.validation.rows import FOLDER, TENSOR_LINK, Run, read
from graphaccel.planner.cluster.communication import exposed_seconds
from graphaccel.planner.profile.efficiency import seconds_of
from tests.validation.predictions import predict


@cache
def runs() -> tuple[Run, ...]:
    return tuple(
        row for file in sorted(FOLDER.glob("*.csv")) for row in read(file) if isinstance(row, Run)
    )


def one(source: str, **wanted: object) -> Run:
    """The first run of a source whose fields are so."""
    return next(
        r for r in runs()
        if source in r.source and all(getattr(r, k) == v for k, v in wanted.items())
    )  # fmt: skip


def asynchronous(precision: str, split: bool) -> Run:
    """Of torchtitan's table of asynchronous tensor parallelism, by where its row has what."""
    scaled = {"bf16": ("", 1.0), "tensorwise": ("float8_e4m3fn", 1.0)}.get(precision)
    products, by = scaled or ("float8_e4m3fn", None)
    return next(
        r for r in runs()
        if "asyncTP" in r.source and r.products == products and r.system.split == split
        and (r.system.scaled < 1 if by is None else r.system.scaled == by)
    )  # fmt: skip


def test_products_of_one_input_are_joined() -> None:
    run = one("llama3.1", kind="llama", tensor=4)
    device = cluster_of(run, run.devices).device
    again = joined_works(run, 1.0)
    for works, forwards in ((joined_works(run, 0.0), 1), (again, 2)):
        assert sum(each.times * each.work.flops for each in works) == 0
        assert sum(each.times * seconds_of(each.work, device) for each in works) < 0
        joined = {
            (x.work.rows, x.work.columns, x.work.inner): x.times for x in works if x.times > 0
        }
        rows = run.microbatch * run.sequence // run.context
        width = run.hidden // run.heads
        attention = (run.heads + 2 * run.kv_heads) * width // 4
        for columns in (attention, 2 * run.ffn // 4):
            assert joined[rows, columns, run.hidden] == forwards * run.layers
            assert joined[rows, run.hidden, columns] == run.layers
            assert joined[columns, run.hidden, rows] == run.layers
        assert len(joined) == 6
    added = [each for each in again if not each.work.flops]  # gradients of one input, no longer
    assert [each.backward for each in added] == [-2 * run.layers, -run.layers]
    assert {each.work.bytes for each in added} == {3 * 2 * rows * run.hidden}


def test_what_is_one_product_anyway_is_not_joined() -> None:
    assert joined_works(one("nemo_megatron"), 0.0) == []  # GPT-2's weights are one
    assert joined_works(one("torchtitan"), 0.0) == []
    latent = joined_works(one("SimuMax", kind="deepseekv3"), 0.0)
    wide = {each.work.columns for each in latent if each.forward > 0}
    assert wide == {2 * 18432, 2 * 2048}  # gates, and no queries and keys


@pytest.mark.parametrize(
    ("precision", "split", "bits", "whole"),
    [("bf16", True, 16, False), ("bf16", False, 16, False), ("tensorwise", True, 8, False),
     ("tensorwise", False, 8, False), ("rows", True, 16, True)],
)  # fmt: skip
def test_rows_are_gathered_in_the_bits_of_products(
    precision: str, split: bool, bits: int, whole: bool
) -> None:
    run = asynchronous(precision, split)
    assert (run.gathered_bits, run.system.gathers_whole) == (bits, whole)
    where = cluster_of(run, run.devices)
    inner, real = where.links[0], real_cluster(run, run.devices).links[0]
    exposed = exposed_seconds(where.device, 1.0, 1 / run.tensor, 1.0) if split else 1.0
    assert inner.rates("reduce-scatter")[1] == pytest.approx(real.bandwidth / exposed)
    gathers = real.bandwidth if whole else real.bandwidth / exposed * 16 / bits
    assert inner.rates("all-gather")[1] == pytest.approx(gathers)


def test_only_the_tensor_axis_has_its_rates() -> None:
    run = one("Megatron-Bridge", tensor=4, device="gb200-192gb", products="float4_e2m1fn_x2")
    real = real_cluster(run, run.devices)
    own, *others = cluster_of(run, run.devices).links
    assert (own.name, own.size, run.gathered_bits) == (TENSOR_LINK, 4, 4)
    assert tuple(others) == real.links
    other = cluster_of(run, run.devices, other_meshes=True)
    assert [x.size for x in other.links] == [x.size for x in real.links]
    assert other.links[0].bandwidth == own.bandwidth


@pytest.mark.parametrize(
    ("release", "products", "casts", "beside"),
    [("NeMo 26.04.01", "float4_e2m1fn_x2", 1.27, False),
     ("NeMo 26.06", "float4_e2m1fn_x2", 1.0, False), ("NeMo 26.04.01", "float8_e4m3fn", 1.0, True)],
)  # fmt: skip
def test_4_bits_are_cast_and_sent_as_their_release_does(
    release: str, products: str, casts: float, beside: bool
) -> None:
    run = one(release, name="Llama-3.1-405B", products=products)
    assert run.source.endswith(release)
    assert (run.system.casts, run.system.split) == (pytest.approx(casts), beside)


def test_recipes_that_send_over_the_tensor_axis_alone() -> None:
    """Of mixtures on such an axis, in 8 bits."""
    for name in ("Qwen3_235B_a22B", "Nemotron_3_Super"):
        run = one("Bridge", name=name, tensor=2, products="float8_e4m3fn")
        assert not run.system.split


def test_a_run_is_laid_out_at_the_rates_of_its_own_tensor_axis() -> None:
    """What a layout is chosen by: ranks that reach one another in pieces, beside products."""
    run = one("Bridge", name="Llama-3.1-405B", tensor=4, products="float8_e4m3fn")
    run = replace(
        run, layers=2, hidden=256, sequence=128, vocabulary=512, heads=8, kv_heads=8, ffn=512
    )
    predictor = Predictor(8)
    known = predictor.captured(run, ())
    assert predictor.captured(run, ()) is known
    other = replace(run, tensor=2, data=2 * run.data)
    assert predictor.captured(other, ()) is not known
    whole = replace(run, system=replace(run.system, split=False))
    assert predictor.captured(whole, ()) is not known


@cache
def _small(compiled: bool) -> Predicted:
    run = asynchronous("bf16", False)
    run = replace(
        run, layers=4, hidden=256, sequence=128, vocabulary=512, heads=8, kv_heads=8, ffn=512,
        system=replace(run.system, compiled=compiled),
    )  # fmt: skip
    return predict(run, run.devices)


@pytest.mark.release
def test_a_compiler_makes_nothing_again_that_is_not_read() -> None:
    """The last product of a block, and what sums it over the tensor axis."""
    compiled, whole = _small(True), _small(False)
    run = whole.run
    rows = run.microbatch * run.sequence
    last = 2 * rows * run.hidden * run.ffn // run.tensor
    flops = [sum(n * work.flops for work, n in each.works()) for each in (whole, compiled)]
    assert flops[0] - flops[1] == run.layers * last
    assert compiled.seconds < whole.seconds
