"""Cache of what is computed from an immutable object, held by that object."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, ParamSpec, TypeVar, cast

P = ParamSpec("P")
T = TypeVar("T")


class AnalysisCache:
    """Results of functions of one owner that never changes: a step graph, its profile, or that
    profile at one microbatch size.

    An owner creates its cache as the field `analyses`, and it lives and ends with the owner: a copy
    of a step graph (`dataclasses.replace`), a pickled or a deep-copied one begins with an empty
    cache. So nothing is ever invalidated. Any module that is given the owner may add results of its
    own functions, and reads them by calling `cached` with the same function; results are shared,
    so they are not changed in place.
    """

    def __init__(self) -> None:
        self._results: dict[tuple[Callable[..., Any], Hashable], Any] = {}

    def __reduce__(self) -> tuple[type[AnalysisCache], tuple[()]]:
        return AnalysisCache, ()

    def cached(
        self, request: Hashable, compute: Callable[P, T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """`compute(*args, **kwargs)`, run once for each function and request.

        request: all that the result depends on besides the owner, such as the fields of the plan
        that it reads; () for nothing. compute: a function of a module or a class, which is one
        object in all calls. Raises ValueError for a lambda or a nested function, which is another
        object in each call and would never be found.
        """
        key = compute, request
        if key not in self._results:
            name = getattr(compute, "__qualname__", "<partial>")
            if "<" in name:
                raise ValueError(f"{name} is another function in each call")
            self._results[key] = compute(*args, **kwargs)
        return cast(T, self._results[key])
