"""The page of coverage says what was measured, and nothing that was is wrong or fails raw."""

import json

from benchmarks.coverage.table import PAGE, page
from benchmarks.shared.common import RESULTS

BODY = json.loads((RESULTS / "coverage.json").read_text())


def test_the_page_is_made_of_the_results():
    assert PAGE.read_text() == page(BODY)


def test_nothing_is_wrong_or_raw():
    outcomes = {
        (part, name, setting): verdict["outcome"]
        for part, entries in BODY["verdicts"].items()
        for name, verdicts in entries.items()
        for setting, verdict in verdicts.items()
    }
    assert len(outcomes) > 800
    assert not {key for key, outcome in outcomes.items() if outcome in ("wrong", "raw")}
