"""Runs a command that ends with its launcher: `python -I -S tether.py PID COMMAND ...`.

Started as a file by `runtime/launch.py` for each rank, it becomes the command. On Linux the kernel
then kills the rank when the launcher dies, however it dies (`kill -9`, out of memory); without this
the ranks would train on, on devices that the next job needs.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main(launcher: int, command: list[str]) -> None:
    """Become the command, tied to the process `launcher`."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != launcher:  # it died before the kernel was asked
            sys.exit(128 + signal.SIGKILL)
    os.execvp(command[0], command)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
