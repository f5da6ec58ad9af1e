"""The parser of every command: an option that it does not know is named beside the closest one."""

from __future__ import annotations

import argparse
import difflib
import re
from typing import Any, NoReturn

_CHOICE = re.compile(r"invalid choice: '(.*?)' \(choose from (.*)\)")


class Parser(argparse.ArgumentParser):
    """A parser that accepts no abbreviated options: a prefix of one of ours may be an option of the
    script that `run` starts."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(allow_abbrev=False, **settings)

    def parse_known_args(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, args: Any = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        """As the base class; the command that an unknown option was typed for refuses it."""
        parsed, unknown = super().parse_known_args(args, namespace)
        known = [name for name in self._option_string_actions if name.startswith("--")]
        for word in unknown:
            close = difflib.get_close_matches(word.partition("=")[0], known, cutoff=0.6)
            if word.startswith("--") and close:
                self.error(f"unrecognized arguments: {' '.join(unknown)} (is it {close[0]}?)")
        return parsed, unknown

    def error(self, message: str) -> NoReturn:
        """End with one line instead of the usage of dozens of options, and the closest choice."""
        wrong = _CHOICE.search(message)
        if wrong is not None:
            names = re.findall(r"[\w.-]+", wrong[2])
            close = difflib.get_close_matches(wrong[1], names, cutoff=0.4)
            message += f" (is it {close[0]}?)" if close else ""
        self.exit(2, f"{self.prog}: error: {message}\n  help: {self.prog} --help\n")
