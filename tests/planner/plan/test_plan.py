"""Plans on disk."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphaccel.ir.program import Sharded
from graphaccel.planner.plan.axis_placements import BlockPlacements
from graphaccel.planner.plan.pins import RESHARDS
from graphaccel.planner.plan.plan import Plan, Precision
from graphaccel.planner.plan.prediction import Alternative, Prediction, StageMemory

names = st.text(max_size=20)
counts = st.integers(1, 1 << 40)
seconds = st.floats(0, 1e6, allow_nan=False)
memories = st.builds(
    StageMemory, counts, counts, counts, counts, counts, counts, counts, counts, names
)
predictions = st.builds(
    Prediction, seconds, seconds, seconds, seconds, seconds, st.lists(memories).map(tuple)
)


def in_order(pairs: dict[str, object]) -> tuple[tuple[str, object], ...]:
    return tuple(sorted(pairs.items(), key=lambda pair: pair[0]))


texts = st.dictionaries(names, names).map(in_order)
blocks = st.builds(BlockPlacements, st.lists(names).map(tuple), texts, texts, texts)
plans = st.builds(
    Plan,
    devices=counts,
    data=counts,
    pipeline=counts,
    tensor=counts,
    context=counts,
    expert=counts,
    zero=st.integers(0, 3),
    reshard_after_forward=st.sampled_from(RESHARDS),
    cast_once=st.booleans(),
    cuda_graphs=st.booleans(),
    min_cut=st.booleans(),
    accumulation=st.sampled_from(["whole", "shards"]),
    placements=st.lists(
        st.tuples(names, st.lists(st.builds(Sharded, names, counts, counts)).map(tuple))
    ).map(tuple),
    axis_placements=st.dictionaries(
        st.sampled_from(["context", "expert", "tensor"]), st.lists(blocks).map(tuple)
    ).map(in_order),
    interleave=counts,
    microbatches=counts,
    schedule=st.sampled_from(["1f1b", "gpipe", "interleaved"]),
    cuts=st.lists(names).map(tuple),
    recompute=st.lists(names).map(tuple),
    precision=st.builds(Precision, names, names, names, st.booleans()),
    bucket_bytes=counts,
    loss_chunk=counts,
    outputs=st.sampled_from(["loss", "all"]),
    batch=counts,
    pinned=st.lists(names).map(tuple),
    graph=names,
    cluster=names,
    prediction=st.none() | predictions,
    alternatives=st.lists(st.builds(Alternative, names, seconds, counts, names)).map(tuple),
    notes=st.lists(names).map(tuple),
    certificate=names,
)


@given(plans)
def test_json_gives_the_plan_back(plan: Plan) -> None:
    assert Plan.from_json(plan.to_json()) == plan


def test_another_schema_is_refused() -> None:
    data = json.loads(Plan(devices=1).to_json())
    with pytest.raises(ValueError, match="schema 99"):
        Plan.from_json(json.dumps({**data, "schema": 99}))


def test_an_unknown_field_is_refused() -> None:
    data = json.loads(Plan(devices=1).to_json())
    with pytest.raises(ValueError, match="unknown fields in plan: speed"):
        Plan.from_json(json.dumps({**data, "speed": 2}))


def test_an_unknown_field_of_placements_is_refused() -> None:
    data = json.loads(Plan(devices=1).to_json())
    data["axis_placements"] = {"tensor": [{"blocks": ["h.0"], "sideways": {}}]}
    with pytest.raises(ValueError, match="unknown fields in axis_placements: sideways"):
        Plan.from_json(json.dumps(data))


def test_the_former_name_of_the_matmul_dtype_is_read() -> None:
    plan = Plan(1, precision=Precision(matmul="tfloat32"))
    data = json.loads(plan.to_json())
    data["precision"]["products"] = data["precision"].pop("matmul")
    assert Plan.from_json(json.dumps(data)) == plan


def test_a_plan_of_schema_1_is_read() -> None:
    data = json.loads(
        Plan(devices=4, data=4, zero=3, shard_size=2, pinned=("shard_size",)).to_json()
    )
    del data["reshard_after_forward"], data["shard_size"], data["axis_placements"]
    older = {**data, "schema": 1, "gather_again": "step", "shard": 2, "pinned": ["shard"]}
    plan = Plan.from_json(json.dumps(older))
    assert (plan.reshard_after_forward, plan.shard_size) == ("once_per_step", 2)
    assert (plan.pinned, plan.schema) == (("shard_size",), 2)
    assert plan.axis_placements == ()  # solved where the plan is used
