"""Fixtures shared by all tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.pool import Pool


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Worker processes for tests of several ranks; none is started before the first such test."""
    workers = Pool()
    yield workers
    workers.close()


@pytest.hookimpl(tryfirst=True)  # xdist reads the groups in the same hook
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """For `--dist loadgroup`: all tests of several ranks on one worker, as they share the pool; of
    the others a file's stay together, as they share captures."""
    if config.pluginmanager.hasplugin("xdist"):
        items.sort(key=lambda item: not _shares(item))  # the longest group first
        for item in items:
            group = "pool" if _shares(item) else item.nodeid.partition("::")[0]
            item.add_marker(pytest.mark.xdist_group(group))


def _shares(item: pytest.Item) -> bool:
    return "pool" in getattr(item, "fixturenames", ())


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--update-golden`: write what a golden test got as what it expects; look at the diff."""
    parser.addoption("--update-golden", action="store_true", default=False)
