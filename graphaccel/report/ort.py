"""Reports as text what a plan runs in ONNX Runtime, what it does not, and why."""

from __future__ import annotations

from graphaccel.errors.messages import columns
from graphaccel.ir.program import OrtDeclined, OrtReport
from graphaccel.planner.plan.plan import Plan

_SHOWN = 3


def ort_lines(plan: Plan) -> list[str]:
    """A few lines for the plan's report; none where ONNX Runtime was not asked for."""
    report = plan.prediction.ort if plan.prediction is not None else None
    if "ort" not in plan.pinned and (report is None or not report.regions):
        return []
    if report is None:
        if plan.ort == "auto":
            return ["  onnxruntime: no region was measured to be faster here (calibrate --ort)"]
        return []
    lines = [f"  onnxruntime {report.build}: {_summary(report)}"]
    lines += [f"    outside: {_words(d)}" for d in report.declined[:_SHOWN]]
    rest = len(report.declined) - _SHOWN
    if rest > 0:
        lines.append(f"    and {rest} more kinds:  graphaccel explain PLAN.json")
    return lines


def ort_report(plan: Plan) -> str:
    """All regions of a plan, and all that was requested but stays in torch."""
    report = plan.prediction.ort if plan.prediction is not None else None
    if report is None:
        return f"ort={plan.ort!r}: nothing runs in ONNX Runtime\n"
    asked = plan.ort if isinstance(plan.ort, str) else ", ".join(plan.ort)
    lines = [f"onnxruntime {report.build}, ort={asked}: {_summary(report)}", ""]
    rows = [("stage", "phase", "module", "ops", "model")]
    rows += [
        (str(r.stage), r.phase, r.module or "(model)", str(r.ops), r.key) for r in report.regions
    ]
    lines += columns(rows)
    if report.declined:
        lines += ["", "outside:"]
        lines += [f"  {_words(d)}" for d in report.declined]
    return "\n".join(lines) + "\n"


def _summary(report: OrtReport) -> str:
    models = len({r.key for r in report.regions})
    share = 100 * report.placed / max(1, report.nodes)
    return (
        f"{len(report.regions)} regions, {models} distinct; "
        f"{report.placed} of {report.nodes} ops ({share:.1f}%)"
    )


def _words(declined: OrtDeclined) -> str:
    where = ", ".join(w for w in (declined.module, declined.location) if w)
    count = f"{declined.count} x " if declined.count > 1 else ""
    return f"{count}{declined.op}: {declined.reason}" + (f" ({where})" if where else "")
