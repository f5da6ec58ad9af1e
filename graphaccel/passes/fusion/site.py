"""One match of a fused op in a forward graph, and whether the op returns what it replaces."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx

from graphaccel.kernels.register import narrowed, op_of, wide_form
from graphaccel.kernels.spec import Function, Fusion

LOW_DTYPES = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Site:
    """One match. place: position of its last node in the graph, by which sites are ordered. inputs:
    name → node, number or None. outputs: the nodes it replaces, in the fusion's order. wide: dtype
    to which its inputs are cast first (by an op, inside): under autocast the pattern computes in
    it. matmul: the input (and its node, with the bias) whose matmul is computed without its
    bias."""

    fusion: Fusion
    place: int
    module: str
    inputs: Mapping[str, Any] = field(repr=False)
    outputs: tuple[fx.Node, ...] = field(repr=False)
    inside: tuple[fx.Node, ...] = field(repr=False)
    wide: torch.dtype | None = None
    matmul: tuple[str, fx.Node] | None = field(default=None, repr=False)


def site_in(site: Site, counterparts: Mapping[fx.Node, fx.Node]) -> Site:
    """The same site in another graph of the same structure, by the counterpart of each node."""
    inputs = {n: counterparts[v] if isinstance(v, fx.Node) else v for n, v in site.inputs.items()}
    outputs = tuple(counterparts[n] for n in site.outputs)
    matmul = None if site.matmul is None else (site.matmul[0], counterparts[site.matmul[1]])
    inside = tuple(counterparts[n] for n in site.inside)
    return replace(site, inputs=inputs, outputs=outputs, inside=inside, matmul=matmul)


def mismatch(site: Site, mode: Any) -> str | None:
    """The op's fake must have dtype, shape and stride of what it replaces; returns why not. A
    result of a rewrite in another layout is copied into that of eager (`_insert_rewrite`)."""
    values = [v.meta["val"] if isinstance(v, fx.Node) else v for v in site.inputs.values()]
    with mode:
        try:
            results = (rewrite_of(site) or op_of_site(site))(*values)
        except (RuntimeError, IndexError, ValueError, TypeError) as problem:
            return f"it does not take these: {str(problem).splitlines()[0]}"
        results = [results] if isinstance(results, Tensor) else list(results)
        wanted = [o.meta["val"] for o in site.outputs]
        results = narrowed(site.fusion, results, wanted)
    copied = site.fusion.rewrite is not None and all(o.is_contiguous() for o in wanted)
    for name, new, old in zip(site.fusion.outputs, results, site.outputs, strict=False):
        expected = old.meta["val"]
        for kind in ("dtype", "shape") if copied else ("dtype", "shape", "stride"):
            a, b = (v.stride() if kind == "stride" else getattr(v, kind) for v in (expected, new))
            if a != b:
                return f"it would change the {kind} of `{name}` from {a} to {b}"
    return None


def rewrite_of(site: Site) -> Function | None:
    """A site's rewrite; casts its inputs first where the site computes in a wider dtype."""
    rewrite, wide = site.fusion.rewrite, site.wide
    if rewrite is None or wide is None:
        return rewrite
    names = tuple(site.fusion.inputs)

    def call(*args: Any, **kwargs: Any) -> Any:
        values = dict(zip(names, args, strict=False)) | kwargs
        low = {n for n, v in values.items() if isinstance(v, Tensor) and v.dtype in LOW_DTYPES}
        return rewrite(**{n: v.to(wide) if n in low else v for n, v in values.items()})

    return call


def op_of_site(site: Site) -> Any:
    """A site's op, in the dtype that the site computes in."""
    form = site.fusion if site.wide is None else wide_form(site.fusion)
    assert form is not None
    return op_of(form)
