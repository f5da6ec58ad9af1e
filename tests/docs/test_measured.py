"""The tables of measurements in the documents are those of the committed results."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType

import pytest

from tests.support.documents import docs_script

STALE = "run python docs/measurements/measured.py"
ROOT = Path(__file__).parents[2]

KERNEL = {"kernel": "swiglu", "phase": "forward", "eager": 4.0, "compile": 2.5}
GPU = {
    "machine": {
        "device": "H200", "driver": "580.1", "cuda": "13.0", "torch": "2.13.0",
        "triton": "3.7.0", "python": "3.12.1",
    },
    "clone": 4e12,
    "kernels": [
        {**KERNEL, "seconds": 2.0, "of_clone": 0.95},
        {**KERNEL, "seconds": 2.0, "of_clone": 0.92},
        {**KERNEL, "phase": "backward", "seconds": None, "of_clone": None},
    ],
    "optimizers": [{"kernel": "adamw", "seconds": 9.0, "fused": 10.0, "of_clone": 0.91}],
    "steps": [
        {
            "model": "gpt2",
            "eager": 0.12, "eager_bytes": 9_500_000_000,
            "compile": 0.1, "compile_bytes": 9_000_000_000,
            "graphaccel": 0.08, "graphaccel_bytes": 8_000_000_000,
            "inductor": None, "inductor_bytes": None,
            "graphs": 0.075, "graphs_bytes": None,
        }
    ],
    "faults": [
        {"name": "swiglu", "case": "backward", "what": "the kernel fails"},
        {"name": "swiglu", "case": "forward", "what": "the kernel fails"},
    ],
}  # fmt: skip


@pytest.fixture(scope="module")
def measured() -> ModuleType:
    return docs_script("measurements/measured")


def test_the_picture_of_growth_is_that_of_the_committed_results() -> None:
    growth = docs_script("measurements/growth")
    drawn = growth.growth_picture(json.loads(growth.RESULT.read_text()))
    assert growth.PICTURE.read_text() == drawn, "run python docs/measurements/growth.py"
    assert drawn.count("<polyline") == 2 * len(growth.PANELS)


def test_a_point_for_each_row(tmp_path: Path) -> None:
    row = {"layers": 4, "search_seconds": 1.0, "seconds": 8.0}
    rows = {f"layers-{n}": row | {"layers": n} for n in (4, 2, 1000)} | {
        "kinds-1": row | {"kinds": 1}
    }
    drawn = docs_script("measurements/growth").growth_picture(rows)
    assert drawn.count("<circle") == 6
    assert [drawn.index(f"{n}: 8.00 s") for n in ("2", "4", "1,000")] == sorted(
        drawn.index(f"{n}: 8.00 s") for n in ("2", "4", "1,000")
    )


def test_the_page_shows_the_committed_results(measured: ModuleType) -> None:
    page = measured.PAGE.read_text()
    assert page == measured.with_table(page, measured.RESULTS), STALE


def test_the_page_shows_what_was_measured_on_a_gpu(measured: ModuleType, tmp_path: Path) -> None:
    page = measured.PAGE.read_text()
    assert page == measured.with_gpu_tables(page, measured.RESULTS), STALE
    marked = f"above\n{measured.GPU_FIRST}old\n{measured.GPU_LAST}below\n"
    without = measured.with_gpu_tables(marked, tmp_path)
    assert without == (
        f"above\n{measured.GPU_FIRST}\nOn a GPU: not measured: no GPU was at hand "
        f"(`python -m benchmarks.gpu`).\n\n{measured.GPU_LAST}below\n"
    )
    (tmp_path / "gpu.json").write_text(json.dumps(GPU))
    after = measured.with_gpu_tables(without, tmp_path)
    assert "On H200 (driver 580.1, CUDA 13.0), torch 2.13.0, triton 3.7.0, Python 3.12.1" in after
    assert "| gpt2 | 120 ms, 9.50 GB | 100 ms, 9.00 GB | 80 ms, 8.00 GB | fails | 75 ms |" in after
    assert "| `swiglu` | 92 % | fails | 0.50 | 0.80 |\n" in after
    assert "| adamw | 91 % | 0.90 |\n" in after
    assert "Faults: 2.\n\n- `swiglu`, backward: the kernel fails (and 1 more)\n" in after
    assert "not measured" not in after
    assert "gpu" not in measured.table([GPU])  # the table of ratios leaves it out
    with pytest.raises(ValueError, match="has no lines"):
        measured.with_gpu_tables("no marks", tmp_path)


def test_the_page_shows_what_was_counted_without_a_gpu(measured: ModuleType) -> None:
    page = measured.PAGE.read_text()
    assert page == measured.with_proxy_table(page, measured.RESULTS), STALE
    with pytest.raises(ValueError, match="has no lines"):
        measured.with_proxy_table("no marks", measured.RESULTS)


def test_the_accuracy_page_shows_the_committed_validation(measured: ModuleType) -> None:
    page = measured.ACCURACY_PAGE.read_text()
    assert page == measured.with_validation(page, measured.RESULTS), STALE


def test_the_page_about_compiling_shows_the_committed_results(measured: ModuleType) -> None:
    page = measured.COMPILE_PAGE.read_text()
    assert page == measured.with_compile_table(page, measured.RESULTS), STALE


def test_a_row_for_each_result(measured: ModuleType, tmp_path: Path) -> None:
    result = {
        "name": "single",
        "command": "python -m benchmarks.single",
        "ratio": 0.904,
        "median_seconds": {"eager": 0.2211, "graphaccel": 0.2},
        "machine": {
            "cores": 2, "processor": "AMD EPYC", "architecture": "x86_64", "python": "3.11.7",
            "torch": "2.13.0",
        },
    }  # fmt: skip
    (tmp_path / "single.json").write_text(json.dumps(result))
    before = f"above\n{measured.BEGIN}old\n{measured.END}below\n"
    after = measured.with_table(before, tmp_path)
    assert (
        "| `python -m benchmarks.single` | 200 ms | eager: 221 ms | 0.904 | AMD EPYC |\n" in after
    )
    assert "Per step on 2 cores, torch 2.13.0, Python 3.11.7" in after
    assert "old" not in after
    assert after.startswith("above\n")
    assert after.endswith("below\n")
    assert measured.with_table(after, tmp_path) == after


def test_a_readme_without_marks_is_refused(measured: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has no lines"):
        measured.with_table("no marks", tmp_path)


def test_the_page_about_onnxruntime_shows_the_committed_results(measured: ModuleType) -> None:
    page = measured.ORT_PAGE.read_text()
    assert page == measured.with_ort_tables(page, measured.RESULTS), STALE


def test_the_page_about_fusions_shows_the_committed_results(measured: ModuleType) -> None:
    page = measured.FUSIONS_PAGE.read_text()
    assert page == measured.with_fusion_table(page, measured.RESULTS), STALE
    with pytest.raises(ValueError, match="has no lines"):
        measured.with_fusion_table("no marks", measured.RESULTS)


def test_a_row_for_each_region(measured: ModuleType) -> None:
    row = {
        "faster_than_eager": {"fx": 1.5, "ort": 1.25, "auto": 1.6},
        "auto_regions": 3,
        "plain": {"build": "plain 1.31.1", "faster_than_eager": {"fx": 1.4, "ort": 1.1}},
    }
    machine = {"cores": 2, "architecture": "x86_64", "python": "3.11.7", "torch": "2.13.0"}
    result = {
        "rows": {"layer_norm": row},
        "threads": 1,
        "build": "training 1.19.2",
        "machine": machine,
    }
    text = measured.ort_table(result)
    assert "| layer norm | 1.50 |  | 1.25 | 1.10 | 1.60 (3 regions) |\n" in text
    assert "ONNX Runtime training 1.19.2 and plain 1.31.1; above 1 is faster." in text
    result["rows"] = {
        "GeluGrad": {"median_seconds": {"torch": 5e-4, "standard": 2e-3, "kernel": 3e-3}}
    }
    assert "| `GeluGrad` | 500 us | 2000 us | 3000 us |\n" in measured.kernel_table(result)
    with pytest.raises(ValueError, match="has no lines"):
        measured.with_ort_tables("no marks", measured.RESULTS)


def test_searches_of_models_with_other_kinds_of_blocks_are_told_apart(measured: ModuleType) -> None:
    row = {
        "model": "llama", "layers": 32, "kinds": 1, "devices": 64, "seconds": 15.75,
        "capture_seconds": 8.5, "search_seconds": 3.5, "build_seconds": 3.75, "load": 1.0,
        "candidates": 22098, "peak_gb": 0.7, "plan": "data 64", "predicted_seconds": 3.875,
        "peak_bytes": 2**36, "published": {},
    }  # fmt: skip
    table = measured.search_table({"kinds-1": row, "kinds-8": row | {"kinds": 8}}).splitlines()
    names = [cell.strip() for cell in table[0].split("|")]
    rows = [[cell.strip() for cell in line.split("|")] for line in table[2:4]]
    assert [len(cells) for cells in rows] == [len(names)] * 2
    assert [cells[names.index("widths")] for cells in rows] == ["1", "8"]
    assert [cells[names.index("H100s")] for cells in rows] == ["64", "64"]


def test_what_a_source_is_off_by_where_the_others_say(measured: ModuleType) -> None:
    figures = {"runs": 3, "mean_absolute": 0.02, "bias": -0.01, "worst": 0.03}
    result = {
        "summary": {
            "sources": dict.fromkeys(("one (2021)", "two, matmuls in 8 bits", "three"), figures),
            "predicted": 9, "mean_of_sources": 0.02, "mean_of_eight_bits": 0.02,
            "verdicts": {"safe": 9},
        },
    }  # fmt: skip
    assert "| one | 3 | 2.0 % | -1.0 % |  |\n" in measured.validation_table(result)
    assert "eft out" not in measured.validation_table({**result, "fit": None})
    fit = {
        "one (2021)": {"runs": 3, "fitted": 0.02, "left_out": 0.06, "without": []},
        "two, matmuls in 8 bits": {
            "runs": 9,
            "fitted": 0.02,
            "left_out": 0.2,
            "without": ["hopper"],
        },
        "three": {"runs": 3, "fitted": 0.02, "left_out": None, "without": []},
    }
    text = measured.validation_table({**result, "fit": {"sources": fit}})
    assert "| one | 3 | 2.0 % | -1.0 % | 6.0 % |  |" in text
    assert "| three | 3 | 2.0 % | -1.0 % |  |  |" in text
    assert text.endswith(
        "\nLeft out: 6.0 % on average over the sources, 20.0 % with matmuls in 8 or 4 "
        "bits; 13.0 % over all rows of the table, 16.5 % over all runs. Against a bar of 10 %: "
        "1 of 2 rows are within it, above it are:\n\n"
        "- two, matmuls in 8 bits: 20.0 % over 9 runs, without its hopper\n"
    )
    well, late = {"spearman": 1.0, "regret": 0.0}, {"spearman": 0.95, "regret": 0.1}
    grids = {
        "as measured": well,
        "by chance": {**late, "corrected": {"line": late, "parabola": well}},
        "of few": {"spearman": 0.5, "regret": 0.02},
    }
    text = measured.validation_table({**result, "summary": {**result["summary"], "grids": grids}})
    assert text.endswith(
        "\nOf 3 grids, runs of one model on as many devices, 2 have a Spearman of 0.9 or more, 2 a "
        "regret of 3 % or less, 1 both. Of the 1 that miss one and can be corrected by a line "
        "fitted on their own times, 1 still do then. Of the 1 that miss one and can be corrected "
        "by a parabola fitted on their own times, 0 still do then.\n"
    )
