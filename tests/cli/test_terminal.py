"""Colour and a running clock on a terminal alone; NO_COLOR takes the colour away."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
COLOUR = re.compile(r"\x1b\[[0-9;]*m")
SAYS = """
import time
from graphaccel.cli.main import main
from graphaccel.progress import progress, running
with running("capture"):
    time.sleep(0.3)
progress("proved", "equal", 0.2)
main(["train", "--task", "causal-lm", "--model", "gpt2"])
"""


def said(**variables: str) -> str:
    """What a terminal of 100 columns gets on standard error."""
    ours, theirs = pty.openpty()
    environment = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "GRAPHACCEL_QUIET")}
    environment |= {"PYTHONPATH": str(ROOT), "TERM": "xterm", "COLUMNS": "100", **variables}
    process = subprocess.Popen(
        [sys.executable, "-c", SAYS], env=environment, stdout=theirs, stderr=theirs, cwd=ROOT
    )
    os.close(theirs)
    text = b""
    try:
        while more := os.read(ours, 4096):
            text += more
    except OSError:  # the other end is closed
        pass
    assert process.wait(timeout=60) == 0
    os.close(ours)
    return text.decode().replace("\r\n", "\n")


@pytest.mark.multiprocess
def test_a_terminal_has_colour_and_a_clock() -> None:
    text = said()
    assert re.search(r"\x1b\[32mproved +\x1b\[0m equal +0.2 s\n", text)
    assert re.search(r"\x1b\[1;31merror\[GA418\]", text)
    assert re.search(r"graphaccel: capture +0:00:00", ESCAPE.sub("", text))


@pytest.mark.multiprocess
@pytest.mark.parametrize("variables", [{"NO_COLOR": "1"}, {"TERM": "dumb"}])
def test_who_wants_none_gets_none(variables: dict[str, str]) -> None:
    text = said(**variables)
    assert not COLOUR.search(text)
    assert "graphaccel: proved     equal" in text
    assert "error[GA418]: `data` is missing" in text


@pytest.mark.multiprocess
def test_a_pipe_gets_plain_text() -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    environment.pop("GRAPHACCEL_QUIET", None)
    done = subprocess.run(
        [sys.executable, "-c", SAYS], env=environment, capture_output=True, text=True, check=True
    )
    assert "\x1b" not in done.stderr
    first = done.stderr.splitlines()[0]
    assert first == f"graphaccel: proved     {'equal':<60}    0.2 s"
