"""Public names are made of words, and of abbreviations that CONTRIBUTING.md lists.

A word is one that the documents or the docstrings of the package use in their prose, in any form of
it, or one of `PLAIN`. A part of a name with less than four letters is an abbreviation unless it is
in `SHORT`; single letters are those of formulae.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "graphaccel"
SHORT = frozenset(
    "act add all and any as at bad bar be big but by can cut do dot end few fit for gap get got "
    "has how in is its job key log low map max min new no non not now of old on one or out own per "
    "pin pop put row run see set sum the to too top two up use way why".split()
)
PLAIN = frozenset(
    "afford alias area attach bisection brief centre chart classified collection condition "
    "consistent control cumulative divisible domain emit ensure examine external forget fuel "
    "gantt inbox incumbent indivisible internal interrupted interval materialise "
    "microsoft mine misfit misuse mutate occupancy outbox packet patience pending perhaps plural "
    "positive presented postprocess reflected retain retry simplify skeleton spare spoil spoilt "
    "tally tape timeline title tools translate unsteady upload verb waterfall world".split()
)
"""Plain words that no prose uses yet."""
CODE = re.compile(
    r"```.*?```|`[^`\n]*`|^\s*[\w, ]{1,40}:|\b\w*[_.(=\[]\w*", flags=re.DOTALL | re.MULTILINE
)
ENDINGS = [
    ("s", ""), ("es", ""), ("ies", "y"), ("ed", ""), ("ed", "e"), ("d", ""), ("ing", ""),
    ("ing", "e"), ("er", ""), ("er", "e"), ("r", ""), ("or", "e"), ("ers", ""), ("ly", ""),
    ("est", ""), ("est", "e"), ("ment", ""), ("able", ""), ("able", "e"), ("ation", "e"),
    ("ions", ""), ("ion", ""),
]  # fmt: skip
BEGINNINGS = ("un", "re", "mis", "in", "non", "de", "sub")


@cache
def words() -> frozenset[str]:
    """Every word of the prose of documents and docstrings."""
    documents = (*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("tests/*.md"))
    texts = [path.read_text(encoding="utf-8") for path in documents]
    for path in PACKAGE.rglob("*.py"):
        texts += docstrings(ast.parse(path.read_text(encoding="utf-8")))
    prose = (CODE.sub("", text).lower() for text in texts)
    return PLAIN.union(*(re.findall("[a-z]+", text) for text in prose))


@cache
def abbreviations() -> frozenset[str]:
    """What the table of CONTRIBUTING.md lists."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    _, _, table = text.partition("### Abbreviations in names\n")
    rows = re.findall(r"^\| (`.*?) \|", table.partition("\n#")[0], flags=re.MULTILINE)
    return frozenset(name for row in rows for name in re.findall(r"`(\w+)`", row))


def docstrings(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            if isinstance(node.value.value, str):
                yield node.value.value


def public_names(body: list[ast.stmt]) -> Iterator[str]:
    """Public functions with their parameters, classes with their fields, constants."""
    for node in body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            if not node.name.startswith("_"):
                arguments = node.args
                yield node.name
                each = (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)
                yield from (argument.arg for argument in each)
        elif isinstance(node, ast.ClassDef):
            if not node.name.startswith("_"):
                yield node.name
                yield from public_names(node.body)
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from (
                target.id
                for target in targets
                if isinstance(target, ast.Name) and not target.id.startswith("_")
            )


def parts(name: str) -> list[str]:
    """The words of a name: `LossFn` → loss, fn; digits are left out."""
    apart = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name)
    return [re.sub(r"\d", "", part) for part in apart.lower().split("_")]


def is_word(part: str) -> bool:
    return part in words() or any(root in words() for root in roots(part))


def roots(part: str) -> Iterator[str]:
    """Words of which a word may be a form."""
    for ending, instead in ENDINGS:
        if part.endswith(ending) and len(part) - len(ending) > 2:
            root = part.removesuffix(ending) + instead
            yield root
            if root[-1] == root[-2]:
                yield root[:-1]
        yield part + ending
    yield part.removesuffix("e") + "ing"
    for beginning in BEGINNINGS:
        if part.startswith(beginning) and len(part) - len(beginning) > 3:
            yield part.removeprefix(beginning)
            yield from roots(part.removeprefix(beginning))


def undocumented(name: str) -> list[str]:
    """The parts of a name that are neither words nor documented abbreviations."""
    return [
        part
        for part in parts(name)
        if len(part) > 1 and part not in abbreviations()
        if not (part in SHORT if len(part) < 4 else is_word(part))
    ]


def test_public_names_are_words_or_documented_abbreviations() -> None:
    bad = {
        f"{path.relative_to(ROOT)}: {name}": found
        for path in sorted(PACKAGE.rglob("*.py"))
        if "compat" not in path.parts  # it has torch's names
        for name in public_names(ast.parse(path.read_text(encoding="utf-8")).body)
        if (found := undocumented(name))
    }
    assert not bad, "say the word, or list it in CONTRIBUTING.md, Abbreviations in names"


def test_abbreviations_are_found() -> None:
    text = "class Cfg:\n    loss_fn: int\n    def set_up(self, tnsr, _hid, planned): ...\n"
    names = [name for name in public_names(ast.parse(text).body) if undocumented(name)]
    assert names == ["Cfg", "tnsr", "_hid"]


def test_every_abbreviation_is_used() -> None:
    trees = (ast.parse(path.read_text(encoding="utf-8")) for path in PACKAGE.rglob("*.py"))
    used = {part for tree in trees for name in public_names(tree.body) for part in parts(name)}
    assert abbreviations() <= used
