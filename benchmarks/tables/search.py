"""Tables of how long captures and searches take."""

from __future__ import annotations

from typing import Any


def large_table(result: list[dict[str, Any]]) -> str:
    """Markdown: what planning deeper and deeper models takes, a row a depth (`large.json`)."""
    rows = [
        "| decisions | layers | ops | capture | plan and rewrite | plans built | all nodes "
        "| memory | load |",
        "|---" * 9 + "|",
    ]
    rows += [
        f"| {'the same' if row['same'] else 'planned'} | {row['layers']} | {row['ops']:,} "
        f"| {row['capture_seconds']:.1f} s | {row['plan_and_rewrite_seconds']:.1f} s "
        f"| {row['plans_built']} "
        f"| {row['nodes_seconds']:.1f} s | {row['peak_gb']:.2f} GB | {row['load']:.1f} |"
        for row in result
    ]
    return "\n".join([*rows, ""])


def search_table(result: dict[str, Any]) -> str:
    """Markdown: how long searches took and what they found (`benchmarks/results/search.json`)."""
    rows = [
        "| model | layers | widths | H100s | in all | capture | search | programs | load "
        "| candidates | memory | plan | step | of a device |",
        "|---" * 14 + "|",
    ]
    beside = [
        "| model | H100s | mesh | planned | step | of meshes, guessed faster | faster |",
        "|---" * 7 + "|",
    ]
    for row in result.values():
        known = f"| {row['model']} | "
        rows.append(
            f"{known}{row['layers']} | {row['kinds']} | {_devices(row)} "
            f"| {row['seconds']:.1f} s | {row['capture_seconds']:.1f} s "
            f"| {row['search_seconds']:.1f} s | {row['build_seconds']:.1f} s "
            f"| {row['load']:.1f} | {row['candidates']:,} "
            f"| {row['peak_gb']:.1f} GB | {row['plan']} | {row['predicted_seconds']:.3g} s "
            f"| {row['peak_bytes'] / 2**30:.1f} GiB |"
        )
        for who, theirs in row["published"].items():
            guessed, faster = (
                "" if many is None else f"{many / theirs['meshes']:.2%}"
                for many in (theirs["guessed_faster"], theirs.get("faster"))
            )
            beside.append(
                f"{known}{_devices(row)} | {who} | {theirs['plan']} "
                f"| {theirs['predicted_seconds']:.3g} s | {guessed} | {faster} |"
            )
    return "\n".join([*rows, "", *beside, ""])


def _devices(row: dict[str, Any]) -> str:
    """How many, and which if they are not what the column says."""
    other = row.get("device", "h100-80gb").partition("-")[0].upper()
    return f"{row['devices']:,}" + (f" {other}s" if other != "H100" else "")
