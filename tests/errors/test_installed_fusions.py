"""Fusions of installed packages (entry-point group `graphaccel.fusions`): found, or named.

A package is a module and a folder `NAME-VERSION.dist-info` beside it, as pip leaves them.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOUBLED = """
from graphaccel import T, fusion

@fusion
class doubled_by_a_package:
    "x * 2."

    inputs = {"x": T("... d")}
    outputs = {"y": T("... d")}

    def pattern(x):
        return x * 2

    def forward(x):
        return x * 2
"""
ERROR = """\
error[GA704]: the fusions of the installed package `fast-ops` 1.2 can not be loaded
  entry point:  {point}  [graphaccel.fusions]
  raised:       {cause}
  why:  every installed package that offers fusions is imported before one is chosen
  help: mend it:  pip install --upgrade --force-reinstall fast-ops
  help: or do without it:  pip uninstall fast-ops
  help: or place no fusions:  graphaccel.optimize(model, optimizer, fusions="off")
  explain: graphaccel explain GA704"""


def installed(folder: Path, source: str, point: str) -> Path:
    """A folder for sys.path, with the package `fast-ops` 1.2: the module `fast_ops`."""
    about = folder / "fast_ops-1.2.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: fast-ops\nVersion: 1.2\n")
    (about / "entry_points.txt").write_text(f"[graphaccel.fusions]\n{point}\n")
    (folder / "fast_ops.py").write_text(source)
    return folder


def run(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command],
        env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{folder}"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_a_package_offers_its_fusions_to_everyone(tmp_path: Path) -> None:
    """It names a module, or a fusion in one."""
    points = "whole = fast_ops\none = fast_ops:doubled_by_a_package"
    folder = installed(tmp_path, DOUBLED, points)
    found = run(folder, "-m", "graphaccel", "fusion", "list")
    assert found.returncode == 0, found.stderr
    (line,) = (x for x in found.stdout.splitlines() if x.startswith("doubled_by_a_package"))
    assert line.split() == ["doubled_by_a_package", "cpu,", "cuda", "x", "*", "2."]
    assert "rms_norm" in found.stdout


def test_a_broken_package_is_named_on_the_command_line(tmp_path: Path) -> None:
    folder = installed(tmp_path, "import no_such_module\n", "ops = fast_ops")
    found = run(folder, "-m", "graphaccel", "fusion", "list")
    cause = "ModuleNotFoundError: No module named 'no_such_module'"
    assert found.stderr.strip() == ERROR.format(point="ops = fast_ops", cause=cause)
    assert found.returncode == 1


BROKEN = {
    "a module that is not there": (
        "",
        "ops = fast_ops_of_old",
        "ModuleNotFoundError: No module named 'fast_ops_of_old'",
    ),
    "a name that is not there": (
        "",
        "ops = fast_ops:gone",
        "AttributeError: module 'fast_ops' has no attribute 'gone'",
    ),
    "an error of several lines": (
        "raise RuntimeError('needs sm_90\\nthis is sm_80')\n",
        "ops = fast_ops",
        "RuntimeError: needs sm_90",
    ),
    "an error that says nothing": ("assert False\n", "ops = fast_ops", "AssertionError: "),
    "a name that is taken": (
        DOUBLED.replace("doubled_by_a_package", "rms_norm"),
        "ops = fast_ops",
        "BadFusion: error[GA701]: the fusion `rms_norm` is refused: an op of this name is "
        "registered already",
    ),
}
EACH = """
import sys
from graphaccel.errors import BadFusionPackage
from graphaccel.kernels.registry import enabled

for folder in sys.argv[1:]:
    sys.path.insert(0, folder)
    for choice in ("auto", "swiglu"):
        try:
            enabled(choice, "cpu")
        except BadFusionPackage as error:
            print(error, type(error.__cause__).__name__, sep="\\n", end="\\n\\n")
    assert enabled("off", "cpu") == ()
    sys.path.remove(folder)
    sys.modules.pop("fast_ops", None)
assert "rms_norm" in enabled("auto", "cpu")  # once all are gone
"""


def test_whatever_is_broken_in_it_is_told(tmp_path: Path) -> None:
    folders = [
        str(installed(tmp_path / str(i), source, point))
        for i, (source, point, _) in enumerate(BROKEN.values())
    ]
    found = run(tmp_path, "-c", EACH, *folders)
    assert found.returncode == 0, found.stderr
    texts = found.stdout.strip().split("\n\n")
    assert len(texts) == 2 * len(BROKEN)
    for (_, point, cause), *both in zip(BROKEN.values(), texts[::2], texts[1::2], strict=True):
        kind = cause.split(":")[0]
        wanted = "\n".join(
            line.rstrip() for line in ERROR.format(point=point, cause=cause).splitlines()
        )
        assert both == [f"{wanted}\n{kind}"] * 2
