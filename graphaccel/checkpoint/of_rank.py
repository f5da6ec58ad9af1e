"""Values and states of objects that ranks have otherwise than rank 0: each rank keeps its own.

Where each rank reads rows of its own, the position in the data is such a state.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

from graphaccel.checkpoint.together import Together
from graphaccel.checkpoint.writing import as_file
from graphaccel.errors import GraphMisuse
from graphaccel.progress import progress

_KINDS = ("objects", "more")
_OWN, _DIFFERENT = "own", "different"


def own_values(together: Together, state: Mapping[str, Any]) -> dict[str, Any]:
    """For the file of this rank: its own values, and the names of those of all ranks. Collective.

    state: what is saved of rank 0 for all of them, by kind and name.
    """
    if together.ranks == 1:
        return {}
    mine = {
        (k, name): hashlib.sha256(as_file(v)).digest()
        for k in _KINDS
        for name, v in state[k].items()
    }
    every = together.each(lambda: mine, lambda _, cause: GraphMisuse(what=cause))
    first = every[0]
    names = sorted(
        {name for one in every for name in {*one, *first} if one.get(name) != first.get(name)}
    )
    if not names:
        return {}
    own = {k: {n: v for n, v in state[k].items() if (k, n) in names} for k in _KINDS}
    return {_OWN: own, _DIFFERENT: [name for _, name in names]}


def with_own_values(
    state: Mapping[str, Any], of_rank: Mapping[str, Any], together: Together, ranks: int
) -> dict[str, Any]:
    """The state of a run as this rank left it; on another number of ranks all get rank 0's.

    of_rank: the file of this rank. ranks: how many saved.
    """
    names = of_rank.get(_DIFFERENT, ())
    if names and together.ranks == ranks:
        return {**state, **{k: {**state[k], **of_rank[_OWN][k]} for k in _KINDS}}
    if names:
        what = f"{', '.join(names)} of each of {ranks} ranks: here all continue from that of rank 0"
        progress("left out", what, 0.0)
    return dict(state)
