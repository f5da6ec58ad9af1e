"""Fixtures shared by all tests."""

from __future__ import annotations

import gc
import logging
import os
import shutil
import tempfile
from collections.abc import Hashable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from tests.support.captures import FOLDER
from tests.support.cases import some_cases, weight_of
from tests.support.pool import Pool, collect, uses_pool

pytest_plugins = ("tests.support.fixtures",)

SLOW = (
    "gloo",
    "planner",
    "cli",
    "kernels",
    "examples",
    "validation",
    "capture",
    "errors",
    "training",
    "passes",
    "sharding",
    "compiler",
    "dispatch",
    "integrations",
    "runtime",
    "ort",
)
"""Folders in the order in which they run, before all others: files that take a minute come first,
or one process would still run the last of them when the others have ended."""

MANY = 1_000_000
"""Objects that a test leaves without a collection."""


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Worker processes for tests of several ranks; none is started before the first such test."""
    workers = Pool()
    yield workers
    workers.close()


def pytest_configure(config: pytest.Config) -> None:
    """A folder for captures, of this run: processes that pytest starts inherit its name. After each
    pass all graphs are checked. No test of properties is timed: how long an example takes is up to
    what else runs."""
    os.environ.setdefault("GRAPHACCEL_VERIFY", "1")
    settings.register_profile(
        "untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow]
    )
    settings.load_profile("untimed")
    # pytest gives its handlers to loggers that do not propagate. torch makes what it tells this one
    # (texts of graphs, stacks) only where there is a handler: a fifth of a capture's time.
    logging.getLogger("torch.__trace").propagate = True
    if FOLDER not in os.environ:
        folder = os.environ[FOLDER] = tempfile.mkdtemp(prefix="graphaccel-captures-")
        config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))
        config.add_cleanup(lambda: os.environ.pop(FOLDER, None))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Folders whose files take longest first, so that all processes end at the same time."""
    if config.getoption("--cases") == "some":
        quick = [item for item in items if item.get_closest_marker("release") is None]
        chosen = some_cases(
            {item.nodeid: _parameters(item) for item in quick},
            {item.nodeid: _weight(item) for item in quick},
        )
        config.hook.pytest_deselected(items=[i for i in items if i.nodeid not in chosen])
        items[:] = [i for i in items if i.nodeid in chosen]
    tests = Path(__file__).parent

    def rank(item: pytest.Item) -> int:
        folder = item.path.relative_to(tests).parts[0]
        return SLOW.index(folder) if folder in SLOW else len(SLOW)

    items.sort(key=rank)


def _parameters(item: pytest.Item) -> dict[str, Hashable]:
    """The parameters of a case: name → value, or its place among the values where it is not plain,
    since the text of an object may differ between two processes."""
    call = getattr(item, "callspec", None)
    if call is None:
        return {}
    plain = (str, int, float, bool, type(None))
    return {
        name: value if isinstance(value, plain) else ("place", call.indices[name])
        for name, value in call.params.items()
    }


def _weight(item: pytest.Item) -> int:
    call = getattr(item, "callspec", None)
    module = getattr(item, "module", None)
    return 1 if call is None else weight_of(call.params, vars(module) if module else {})


def pytest_collection_finish() -> None:
    """What the imports left is never garbage: collections need not look at it again. There is one
    after each module, and after each test that left much: none of what a capture builds."""
    gc.collect()
    gc.freeze()
    gc.disable()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """`--dist loadfile` runs the files that use the pool in two processes, those of plans and
    models apart: more pools would import, capture and unpack again what these two have. What is
    left at the end, all processes take."""
    from xdist.scheduler import LoadFileScheduling

    class WithTwoPools(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.split("::", 1)[0]
            if not uses_pool(config.rootpath / file):
                return file
            return "plans" if file.startswith(("tests/gloo/plans", "tests/gloo/models")) else "pool"

    return WithTwoPools(config, log) if config.getoption("dist") == "loadfile" else None


@pytest.fixture(autouse=True)
def _left() -> Iterator[None]:
    """Tests that create very many objects leave none of them to the next."""
    yield
    if gc.get_count()[0] > MANY:
        gc.collect()


@pytest.fixture(scope="session")
def _memory() -> list[int]:
    """The argument of the next `collect`."""
    return [0]


@pytest.fixture(scope="module", autouse=True)
def _kept(_memory: list[int]) -> Iterator[None]:
    """Nor is what tests of a module keep for those of others."""
    yield
    _memory[0] = collect(_memory[0])


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--update-golden`: write what a golden test got as what it expects; look at the diff.
    `--cases some`: of parametrized tests some cases (`support/cases.py`), and none that is marked
    `release`, as `make test` does."""
    parser.addoption("--update-golden", action="store_true", default=False)
    parser.addoption("--cases", choices=("all", "some"), default="all")
