"""`graphaccel doctor`: reports what is installed and on this machine, and what each gap costs."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import metadata

from graphaccel import __version__
from graphaccel.errors.messages import columns, format_bytes

REQUIRED = ("jinja2", "networkx", "numpy", "onnx", "rich", "sympy", "typing-extensions")
OPTIONAL = {
    "transformers": "no `graphaccel train`, no Trainer: pip install 'graphaccel[integrations]'",
    "tokenizers": "no text is made tokens: pip install 'graphaccel[examples]'",
    "accelerate": "no `Accelerator`: pip install 'graphaccel[integrations]'",
    "lightning": "no `Strategy` of Lightning: pip install 'graphaccel[lightning]'",
}
"""What is missing without a package that some commands or integrations need."""

_TORCH_FROM, _TORCH_BEFORE = (2, 11), (2, 14)


@dataclass(frozen=True)
class Finding:
    """One line of the report. cost: the effect of what is missing, "" when nothing is; fatal:
    nothing works without it."""

    name: str
    state: str
    cost: str = ""
    fatal: bool = False


def run() -> int:
    """Print the report; returns 1 if something is missing without which nothing works, else 0."""
    findings = [*package_findings(installed_version), *machine_findings()]
    print(report(findings))
    return int(any(finding.fatal for finding in findings))


def report(findings: Sequence[Finding]) -> str:
    """The findings as aligned text, gaps marked by "!" ("x" for fatal ones)."""
    marks = {False: "!", True: "x"}
    rows = [
        (f"{marks[f.fatal] if f.cost else ' '} {f.name}", f.state, f.cost and f"-> {f.cost}")
        for f in findings
    ]
    gaps = sum(bool(finding.cost) for finding in findings)
    last = "nothing is missing" if gaps == 0 else f"{gaps} to look at, marked ! or x"
    return "\n".join([f"graphaccel {__version__}", *columns(rows), last])


def installed_version(distribution: str) -> str | None:
    """The version of an installed distribution, None when it is not installed."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def package_findings(version_of: Callable[[str], str | None]) -> list[Finding]:
    """Python and the packages; `version_of` gives a distribution's version or None."""
    findings = [Finding("python", platform.python_version())]
    findings.append(_torch(version_of("torch")))
    for name in REQUIRED:
        version = version_of(name)
        missing = "" if version else f"graphaccel needs it: pip install {name}"
        findings.append(Finding(name, version or "missing", missing, fatal=version is None))
    findings.append(_onnxruntime(version_of))
    triton = version_of("triton")
    cost = "" if triton else "no fused GPU kernels; nothing is lost without a GPU"
    findings.append(Finding("triton", triton or "missing", cost))
    for name, lacks in OPTIONAL.items():
        version = version_of(name)
        findings.append(Finding(name, version or "missing", "" if version else lacks))
    return findings


def _torch(version: str | None) -> Finding:
    supported = f"needs {'.'.join(map(str, _TORCH_FROM))} up to before "
    supported += ".".join(map(str, _TORCH_BEFORE))
    if version is None:
        return Finding("torch", "missing", f"nothing runs; {supported}", fatal=True)
    number = tuple(int(part) for part in version.split("+")[0].split(".")[:2])
    wrong = not _TORCH_FROM <= number < _TORCH_BEFORE
    return Finding("torch", version, f"untested; {supported}" if wrong else "", fatal=wrong)


def _onnxruntime(version_of: Callable[[str], str | None]) -> Finding:
    for name in ("onnxruntime-training-cpu", "onnxruntime-training"):
        if version := version_of(name):
            return Finding("onnxruntime", f"{version} ({name})")
    hint = "no part of a training step runs in ONNX Runtime: pip install 'graphaccel[ort]'"
    for name in ("onnxruntime-gpu", "onnxruntime"):
        if version := version_of(name):
            cost = "without training kernels: gradients are made of standard operators"
            return Finding("onnxruntime", f"{version} ({name})", cost)
    return Finding("onnxruntime", "missing", hint)


def machine_findings() -> list[Finding]:
    """Cores, memory, CUDA devices and communication backends. Imports torch if it is installed."""
    affinity = getattr(os, "sched_getaffinity", None)
    cores = len(affinity(0)) if affinity else os.cpu_count() or 1
    findings = [Finding("cores", str(cores))]
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        findings.append(Finding("memory", format_bytes(memory)))
    if installed_version("torch") is None:
        return findings
    import torch
    from torch import distributed

    cuda = torch.cuda.is_available()
    devices = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    for i, device in enumerate(devices if cuda else []):
        findings.append(Finding(f"cuda:{i}", f"{device.name}, {format_bytes(device.total_memory)}"))
    if not cuda:
        findings.append(Finding("cuda", "no device", "training runs on CPU processes"))
    gloo = distributed.is_available() and distributed.is_gloo_available()
    nccl = distributed.is_available() and distributed.is_nccl_available()
    findings.append(
        Finding("gloo", "available")
        if gloo
        else Finding("gloo", "missing", "no training on several CPU processes")
    )
    if nccl:
        findings.append(Finding("nccl", "available"))
    else:
        cost = "no training on several GPUs" if cuda else ""
        findings.append(Finding("nccl", "missing" if cuda else "missing (no GPU needs it)", cost))
    return findings
