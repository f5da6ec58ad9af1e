"""One start of `graphaccel run` on the training script: what it prints, its ranks, and its end."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

SCRIPT = Path(__file__).with_name("train.py")
ROOT = SCRIPT.parents[2]
LIMIT_S = 600.0


class Life:
    """A running job; `lines` are those of all ranks so far, with the time at which each came."""

    def __init__(self, folder: Path, *arguments: str, devices: int = 4, restarts: int = 0) -> None:
        """arguments: of the script. restarts: how many times the ranks are started anew."""
        options = ["--devices", str(devices), "--all-output", "--checkpoint", str(folder)]
        options += ["--max-restarts", str(restarts)] if restarts else []
        command = [sys.executable, "-m", "graphaccel", "run", *options, str(SCRIPT), *arguments]
        self.lines: list[tuple[float, str]] = []
        self._changed = threading.Condition()
        self._process = subprocess.Popen(
            command,
            env={**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            with self._changed:
                self.lines.append((time.monotonic(), line.rstrip("\n")))
                self._changed.notify_all()

    def wait_for(self, text: str, after: int = 0) -> int:
        """Wait for a line that starts with `text`, from line `after` on; the number of the next."""
        deadline = time.monotonic() + LIMIT_S
        with self._changed:
            while True:
                for place in range(after, len(self.lines)):
                    if self.lines[place][1].startswith(text):
                        return place + 1
                if not self._reader.is_alive() or time.monotonic() > deadline:
                    raise RuntimeError(f"no line `{text}`:\n" + self.text())
                self._changed.wait(1.0)

    def text(self) -> str:
        """All that was printed."""
        return "\n".join(line for _, line in self.lines)

    def losses(self) -> list[tuple[int, str]]:
        """Each step and its loss, in hexadecimal."""
        words = [line.split() for _, line in self.lines if line.startswith("loss ")]
        return [(int(step), loss) for _, step, loss in words]

    def ranks(self, count: int, others: frozenset[int] = frozenset()) -> dict[int, int]:
        """Process numbers by rank, once all of them exist. others: of an earlier start."""
        deadline = time.monotonic() + LIMIT_S
        while time.monotonic() < deadline:
            found = {rank: pid for rank, pid in self._children() if pid not in others}
            if len(found) == count:
                return found
            time.sleep(0.05)
        raise RuntimeError("the ranks do not start:\n" + self.text())

    def _children(self) -> list[tuple[int, int]]:
        found = []
        for task in Path(f"/proc/{self._process.pid}/task").glob("*/children"):
            for pid in map(int, task.read_text().split()):
                try:
                    variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                except OSError:
                    continue
                ranks = [v.partition(b"=")[2] for v in variables if v.startswith(b"RANK=")]
                found += [(int(rank), pid) for rank in ranks]
        return found

    def kill(self, pid: int, others: list[int]) -> float:
        """kill -9 of one rank; seconds until it and `others` are gone."""
        ends = [os.pidfd_open(each) for each in (pid, *others)]
        start = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        for end in ends:
            if not select.select([end], [], [], LIMIT_S)[0]:
                raise RuntimeError("a rank trains on:\n" + self.text())
            os.close(end)
        return time.monotonic() - start

    def end(self) -> int:
        """Wait for the launcher; its exit code."""
        code = self._process.wait(LIMIT_S)
        self._reader.join()
        assert self._process.stdout is not None
        self._process.stdout.close()
        return code

    def stop(self) -> int:
        """SIGTERM: it saves and ends; its exit code."""
        self._process.send_signal(signal.SIGTERM)
        return self.end()
