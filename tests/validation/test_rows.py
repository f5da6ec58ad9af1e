"""Published rows of every kind: what is read of them, and that they can be predicted."""

from __future__ import annotations

import csv
import json
from collections import Counter
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from benchmarks.validation.__main__ import RESULT, main
from benchmarks.validation.experts import sent_once_a_node
from benchmarks.validation.mixtures import MIXTURES
from benchmarks.validation.models import model_of
from benchmarks.validation.predict import real_cluster
from benchmarks.validation.rows import FOLDER, Run, read
from benchmarks.validation.systems import EAGER_LAUNCH, System
from tests.validation.predictions import predict


@cache
def rows() -> tuple[Run | str, ...]:
    return tuple(row for file in sorted(FOLDER.glob("*.csv")) for row in read(file))


@cache
def unseen() -> tuple[Run, ...]:
    """Of models that nothing is fitted on."""
    found = [row for file in sorted((FOLDER / "unseen").glob("*.csv")) for row in read(file)]
    assert all(isinstance(row, Run) for row in found)
    return tuple(row for row in found if isinstance(row, Run))


def runs(**wanted: object) -> list[Run]:
    """Those whose fields are so."""
    return [
        r for r in rows()
        if isinstance(r, Run) and all(getattr(r, k) == v for k, v in wanted.items())
    ]  # fmt: skip


def small(run: Run, **changed: object) -> Run:
    """The same kind of run, of few layers that are captured in seconds."""
    usual = {"layers": 4, "hidden": 256, "sequence": 128, "vocabulary": 512}
    return replace(run, **{**usual, "heads": 8, "kv_heads": 8, "ffn": 512, **changed})


def test_what_is_left_out_has_its_reason() -> None:
    with (FOLDER / "validation_rows.csv").open() as text:
        assert len(rows()) > sum(1 for _ in csv.DictReader(text))
    reasons = Counter(row for row in rows() if isinstance(row, str))
    assert all(" are not stated" in reason for reason in reasons)
    assert sum(reasons.values()) <= 3


def test_rows_that_contradict_all_recipes_have_the_mesh_of_theirs() -> None:
    said = "the mesh of its recipe, which its table contradicts"
    changed = [r for r in rows() if isinstance(r, Run) and said in r.assumed]
    assert all("26.02.01" in r.source for r in changed)
    assert {(r.name, r.device, r.products): (r.data, r.tensor, r.pipeline, r.context, r.interleave,
            r.microbatch) for r in changed} == {
        ("Llama-3-70B", "gb300-288gb", "float4_e2m1fn_x2"): (16, 1, 4, 1, 5, 1),
        ("Llama-3-70B", "gb300-288gb", "float8_e4m3fn"): (16, 1, 4, 1, 5, 1),
        ("Llama-3.1-405B", "gb200-192gb", "float4_e2m1fn_x2"): (4, 4, 16, 1, 8, 1),
        ("Llama-3.1-405B", "gb300-288gb", "float8_e4m3fn"): (8, 4, 8, 1, 4, 1),
    }  # fmt: skip


def test_ranks_that_share_experts() -> None:
    """As many as the row has where they are as many as its ranks of data, or fewer."""
    (run,) = {
        (r.data, r.expert, r.tensor) for r in runs(name="Qwen3_235B_a22B", device="h100-80gb")
    }
    assert run == (16, 16, 2)
    assert {r.assumed for r in runs(kind="Qwen3_235B_a22B", tensor=2)} == {
        ("experts are shared by 16, which cut each over the tensor axis",)
    }
    grok = next(r for r in runs(kind="Grok-1") if r.devices == 128)
    assert (grok.data, grok.expert, grok.microbatches * grok.data, grok.batch) == (32, 8, 256, 256)


@pytest.mark.parametrize(
    ("kind", "billions"),
    [("Qwen3_235B_a22B", 235), ("GPT OSS 120B", 117), ("DeepSeekV3 (w/o MTP)", 671),
     ("Kimi_K2", 1026), ("Grok-1", 314), ("Nemotron_3_Super", 120.6), ("Qwen3_30B_a3B", 30.5),
     ("Nemotron_3_Nano", 31.6)],
)  # fmt: skip
def test_mixtures_have_as_many_numbers_as_their_makers_say(kind: str, billions: float) -> None:
    """Without layers that predict further tokens."""
    known = [*runs(kind=kind), *(run for run in unseen() if run.kind == kind)]
    run = max(known, key=lambda r: r.layers)
    model = model_of(run)[0]
    numbers = sum(p.numel() for p in getattr(model, "base", model).parameters())
    assert numbers / 1e9 == pytest.approx(billions, rel=0.01)


def test_what_nothing_is_fitted_on_is_of_other_models() -> None:
    """Mixtures of other kinds; others of another size, or on another mesh, in what paper ever."""
    seen = {row.kind for row in rows() if isinstance(row, Run) and row.kind in MIXTURES}
    mixtures = [run for run in unseen() if run.kind in MIXTURES]
    assert len(mixtures) == 72
    assert not {run.kind for run in mixtures} & seen

    def mesh(run: Run) -> tuple[object, ...]:
        axes = run.data, run.tensor, run.pipeline, run.interleave, run.microbatch
        return run.layers, run.hidden, run.batch, run.recompute, *axes

    others = [run for run in unseen() if run.kind not in MIXTURES]
    assert len({mesh(run) for run in others}) == len(others) == 7
    assert not {mesh(run) for run in others} & {mesh(r) for r in rows() if isinstance(r, Run)}


def test_rows_of_deepseek_go_by_deep_ep_beside_another_where_recipes_say_so() -> None:
    systems = {
        (run.device, run.source.split()[-1]): run.system
        for run in unseen() if run.kind == "DeepSeekV3"
    }  # fmt: skip
    by = {key for key, s in systems.items() if s.once_a_node and s.beside_another}
    assert by == {("b200-192gb", "26.04.01")}


@pytest.mark.release
def test_experts_that_are_made_again() -> None:
    run = next(run for run in unseen() if run.system.experts_again)
    assert (run.kind, run.device) == ("Nemotron_3_Nano", "h100-80gb")
    run = replace(run, layers=6, sequence=256, devices=8, data=8, batch=8)
    found, kept = (
        predict(replace(run, system=replace(run.system, experts_again=again)))
        for again in (True, False)
    )
    assert [name.rpartition(".")[2] for name in found.plan.recompute] == ["1", "3"]
    assert kept.plan.recompute == ()
    assert found.plan.prediction is not None
    assert kept.plan.prediction is not None
    assert found.plan.prediction.compute > kept.plan.prediction.compute


_OWN = {
    "source": "ours", "model": "Qwen2.5", "layers": "2", "hidden": "256", "heads": "4",
    "seq": "128", "vocab": "512", "gpus": "4", "gpu_type": "H200", "dp": "4", "micro_batch": "2",
    "global_batch": "16", "zero": "3", "measured_iter_s": "0.01",
}  # fmt: skip


def own(tmp_path: Path, *changed: dict[str, str]) -> list[Run | str]:
    """Rows of a table with few columns, as read."""
    file = tmp_path / "own.csv"
    with file.open("w", newline="") as text:
        columns = dict.fromkeys(name for each in (_OWN, *changed) for name in each)
        table = csv.DictWriter(text, list(columns))
        table.writeheader()
        table.writerows(_OWN | each for each in changed)
    return list(read(file))


def test_tables_of_one_s_own_have_what_columns_they_have(tmp_path: Path) -> None:
    (run,) = own(tmp_path, {})
    assert isinstance(run, Run)
    assert (run.kind, run.device, run.zero, run.precision) == ("llama", "h200-141gb", 3, "bfloat16")
    assert run.assumed == (
        "plain PyTorch with fused attention: its system is not known",
        "bfloat16: what its MFU is of",
    )


@pytest.mark.parametrize(
    ("called", "device"),
    [
        ("NVIDIA A100-SXM4-40GB", "a100-40gb"),
        ("A100", "a100-80gb"),
        ("H100-96GB-HBM2e(500W)", "h100-80gb"),
        ("Tesla V100-SXM2-16GB", "v100-16gb"),
        ("T4", "t4-16gb"),
        ("GeForce RTX 4090", "rtx4090-24gb"),
        ("l40s-48gb", "l40s-48gb"),
    ],
)
def test_devices_by_what_sources_call_them(tmp_path: Path, called: str, device: str) -> None:
    (run,) = own(tmp_path, {"gpu_type": called})
    assert isinstance(run, Run)
    assert run.device == device


def test_rows_that_are_no_runs_say_why(tmp_path: Path) -> None:
    assert own(
        tmp_path,
        {"gpu_type": "TPU v4"},
        {"layers": "many"},
        {"global_batch": "0"},
        {"gpus": "8"},
        {"measured_iter_s": ""},
        {"measured_iter_s": "0"},
        {"measured_iter_s": "", "measured_tokens_per_s_per_gpu": "0"},
    ) == [
        "device TPU v4 is not in the catalogue",
        "no run: could not convert string to float: 'many'",
        "no run: global_batch is 0",
        "the axes are not the devices",
        "neither step time nor tokens/s nor FLOP/s",
        "no run: a step of 0.0 s",
        "no run: a rate of 0",
    ]


def test_shards_in_groups_are_over_all_data_ranks(tmp_path: Path) -> None:
    (run,) = own(tmp_path, {"gpus": "16", "global_batch": "32", "zero": "HSDP"})
    assert isinstance(run, Run)
    assert (run.data, run.zero) == (16, 3)
    assert "shards over all 16 data ranks" in run.assumed


def test_systems_of_other_sources_are_those_of_their_framework(tmp_path: Path) -> None:
    named = ("NVIDIA/Megatron-LM@core_v0.12 README", "NVIDIA/NeMo docs", "DachengLi1/AMP", "ours")
    found = own(tmp_path, *({"source": source} for source in named))
    core, nemo, amp, ours = (run.system for run in found if isinstance(run, Run))
    assert (core.zero, core.split, nemo.joined) == (1, True, True)
    assert (amp.launch_seconds, amp.overlaps, ours) == (EAGER_LAUNCH, False, System())


def test_runs_of_one_s_own_are_predicted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    own(tmp_path, {}, {"micro_batch": "4"}, {"gpu_type": "TPU v4"})
    file, out = tmp_path / "own.csv", tmp_path / "out.json"
    kept = RESULT.read_text()
    arguments = ["validation", "--rows", str(file), "--out", str(out)]
    monkeypatch.setattr("sys.argv", arguments)
    main()
    said = capsys.readouterr().out
    assert "2 runs predicted, 0 refused; 1 of 3 rows left out\n" in said
    assert "1 left out: device TPU v4 is not in the catalogue\n" in said
    assert "mean over products" not in said
    found = json.loads(out.read_text())
    assert len(found["runs"]) == 2
    assert found["command"] == "python -m benchmarks.validation --rows"
    assert RESULT.read_text() == kept


@pytest.mark.parametrize(
    ("table", "status", "said"),
    [
        (None, 2, "No such file or directory"),
        ("a,b\n1,2\n", 2, "has no column source, model, gpus, gpu_type, global_batch"),
        (
            "source,model,gpus,gpu_type,global_batch\nours,GPT,8,TPU,16\n",
            1,
            "none of 1 rows is a run that can be predicted\n"
            "  1 rows: device TPU is not in the catalogue",
        ),
    ],
)
def test_tables_that_can_not_be_predicted(
    table: str | None,
    status: int,
    said: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    file = tmp_path / "own.csv"
    if table is not None:
        file.write_text(table)
    monkeypatch.setattr("sys.argv", ["validation", "--rows", str(file)])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == status
    assert said in capsys.readouterr().err


def test_flops_are_seconds() -> None:
    """Llama 3's 400 TFLOP/s on 16,384 devices: 2048 sequences of 8192 tokens; 6 FLOPs a weight and
    token, and attention."""
    run = next(r for r in runs(devices=16384, sequence=8192) if "2407.21783" in r.source)
    weights = 6 * 405e9 * 2048 * 8192 / (400e12 * 16384)
    assert run.seconds == pytest.approx(1.04 * weights, rel=0.01)


def test_what_rows_do_not_say_is_the_system_s_default_or_the_planner_s_choice() -> None:
    for run in runs(sequence=8192, recompute="all", devices=512):
        assert run.microbatches == 8
        assert "8 microbatches: the system's default" in run.assumed
    run = next(r for r in runs(microbatch=0) if "core_v0.8" in r.source)
    run = small(run, devices=8, data=8, tensor=1, pipeline=1, batch=64, interleave=1, memory=None)
    found = predict(run)
    assert found.run.microbatch > 0
    assert found.run.assumed[-1].endswith("the planner's choice")
    assert found.plan.microbatches == found.run.microbatches


def test_experts_are_predicted_on_their_axis() -> None:
    run = small(next(r for r in runs(kind="Qwen3_235B_a22B", tensor=1)), microbatch=1, batch=32)
    run = replace(run, devices=8, data=8, expert=8, pipeline=1, interleave=1)
    found = predict(run)
    assert (found.plan.data, found.plan.expert, found.plan.microbatches) == (1, 8, 4)
    assert found.seconds > 0


@pytest.mark.release
def test_layers_of_different_kinds_are_predicted() -> None:
    """State space layers, attention and experts, on a tensor and an expert axis."""
    run = small(next(r for r in runs(kind="Nemotron_3_Super", tensor=2)), layers=8, kv_heads=2)
    run = replace(run, devices=8, data=4, expert=4, batch=32, products="")
    found = predict(run)
    assert (found.plan.data, found.plan.expert, found.plan.tensor) == (1, 4, 2)
    scans = [n for n in found.profile.nodes if "validation.scan" in str(n.target)]
    assert len(scans) == 2 * 4
    assert scans[0].meta["dims"][2] == 8 // 2  # groups of heads
    assert found.seconds > 0


def test_rows_that_go_once_to_a_node_cross_faster_links() -> None:
    """22 of 512 experts on 8 nodes of 8: 8 x (1 - (7/8)^22) nodes are reached of 22 rows."""
    run = next(r for r in runs(kind="Nemotron_3_Super", device="b200-192gb") if r.expert == 64)
    where = real_cluster(run, run.devices)
    inner, outer = sent_once_a_node(run, where).links
    assert inner == where.links[0]
    faster = outer.bandwidth / where.links[1].bandwidth
    assert faster == pytest.approx(22 / (8 * (1 - (7 / 8) ** 22)))


def test_operations_that_are_kept_take_memory_and_spare_time() -> None:
    one = next(r for r in runs(recompute="operations", precision="bfloat16") if not r.products)
    one = small(one)
    every, some = (predict(replace(one, recompute=r)) for r in ("all", "operations"))
    none = predict(replace(one, recompute="none"))
    assert none.seconds < some.seconds < every.seconds
    assert every.memory < some.memory


def test_four_bits_are_faster_than_eight() -> None:
    """Of products so large that the device does not wait for its process."""
    run = next(r for r in runs(products="float4_e2m1fn_x2", kind="llama"))
    run = small(run, devices=8, data=8, batch=64, microbatch=8, hidden=8192, ffn=28672)
    run = replace(run, tensor=1, pipeline=1, interleave=1, sequence_parallel=False)
    run = replace(run, heads=64, kv_heads=8, memory=None)
    eight = replace(run, products="float8_e4m3fn")
    assert predict(run).seconds < predict(eight).seconds
    assert run.reported.endswith(", matmuls in 4 bits")
