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


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--update-golden`: write what a golden test got as what it expects; look at the diff."""
    parser.addoption("--update-golden", action="store_true", default=False)
