"""`graphaccel explain`: an error code, a model's fusions or rules, a saved plan, or the passes."""

from __future__ import annotations

from pathlib import Path


def explain_command(
    subject: str | tuple[Path, str | None], *, rules: bool = False, strict: bool = False
) -> int:
    """Print what there is to say of a subject; returns the exit code.

    subject: an error code, "passes", the path of a plan, or the file and function of a model.
    rules: of a model, the sharding rule of every op instead of its fusions; strict: an op without
    one is an error.
    """
    if not isinstance(subject, str):
        return _explain_model(*subject, rules=rules, strict=strict)
    if subject == "passes":
        from graphaccel.cli.passes import passes_command

        return passes_command()
    if subject.endswith(".json"):
        return _explain_plan(subject)
    package = Path(__file__).parents[1]
    folders = (package / "docs_errors", package.parent / "docs" / "errors")  # wheel, checkout
    pages = [folder / f"{subject}.md" for folder in folders]
    page = next(page for page in pages if page.is_file())
    print(page.read_text(encoding="utf-8").rstrip())
    return 0


def _explain_model(file: Path, function: str | None, *, rules: bool, strict: bool) -> int:
    if rules:
        from graphaccel.cli.rules import rules_command

        return rules_command(file, function, strict=strict)
    from graphaccel.cli.fusion import explain

    return explain(file, function)


def _explain_plan(path: str) -> int:
    """The placements of a saved plan, and where its ops run."""
    from graphaccel.arguments import read_plan
    from graphaccel.report.ort import ort_report
    from graphaccel.report.placements import placement_lines

    plan = read_plan(path, {})
    assert plan is not None
    placements = placement_lines(plan)
    if placements:
        print("\n".join(placements) + "\n")
    print(ort_report(plan), end="")
    return 0
