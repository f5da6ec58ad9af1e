"""Silences torch's own reports of a failed export."""

from __future__ import annotations

import io
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from unittest.mock import patch


@contextmanager
def without_reports() -> Iterator[None]:
    """Silence export and fake tensors, which log their own report of a failure and print the graph:
    our error text replaces both. What the forward asks of logging stays as it is."""
    if os.environ.get("GRAPHACCEL_TRACEBACK") == "full":
        yield
        return
    printed, graph, handle = io.StringIO(), None, logging.Logger.handle

    def handled(self: logging.Logger, record: logging.LogRecord) -> None:
        if record.name.partition(".")[0] != "torch" or record.levelno > logging.ERROR:
            handle(self, record)

    try:
        with redirect_stderr(printed), patch.object(logging.Logger, "handle", handled):
            yield
    except Exception as error:
        graph = getattr(error.__cause__, "partial_fx_graph", None)
        raise
    finally:
        own = printed.getvalue()
        sys.stderr.write(own if graph is None else own.replace(f"{graph}\n", ""))
