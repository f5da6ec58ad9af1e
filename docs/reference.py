"""Write docs/reference.md: the public names of graphaccel with signatures and docstrings.

    python docs/reference.py

tests/docs fails while the page is not that of the source.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "reference.md"
PACKAGE = ROOT / "graphaccel"
HEAD = """# The public names

Written by `python docs/reference.py` from the docstrings; do not edit. Pins, which
`optimize` and `plan` take as keyword arguments, are in [pins.md](pins.md), errors in
[errors](errors/README.md).
"""
FURTHER = {
    "GraphAccelError": "graphaccel.errors.base",
    "debug.bisect": "graphaccel.debug",
    "debug.Bisection": "graphaccel.debug",
}
"""Names that `graphaccel._PUBLIC` does not list → their modules."""
HANDLE = ("graphaccel.optimized_model", "Handle")
"""The class of `model.graphaccel`."""

Definition = ast.FunctionDef | ast.ClassDef


def page() -> str:
    """The text of docs/reference.md."""
    parts = [HEAD]
    for name, module in sorted(_public().items(), key=lambda item: item[0].lower()):
        node = _definition(module, name.rpartition(".")[2])
        parts.append(f"\n## graphaccel.{name}\n\n{_described(node)}")
    return "".join(parts) + "".join(_handle())


def _public() -> dict[str, str]:
    tree = ast.parse((PACKAGE / "__init__.py").read_text(encoding="utf-8"))
    assigned = {
        target.id: node.value
        for node in tree.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    return ast.literal_eval(assigned["_PUBLIC"]) | FURTHER


def _handle() -> Iterator[str]:
    """The section of `model.graphaccel`: its public properties and methods that are documented for
    users, which are those before the first comment about other members."""
    node = _definition(*HANDLE)
    assert isinstance(node, ast.ClassDef)
    yield f"\n## model.graphaccel\n\n{prose(ast.get_docstring(node) or '')}"
    yield "\n| | |\n|---|---|\n"
    for member in node.body:
        if isinstance(member, ast.FunctionDef) and member.name == "prepare":
            return
        if isinstance(member, ast.FunctionDef) and not member.name.startswith("_"):
            call = "" if member.decorator_list else "()"
            text = " ".join((ast.get_docstring(member) or "").split())
            yield f"| `{member.name}{call}` | {text} |\n"


def _definition(module: str, name: str) -> Definition:
    """Where a name is defined, the last time (which is after the overloads)."""
    path = ROOT / (module.replace(".", "/") + ".py")
    tree = ast.parse(path.read_text(encoding="utf-8"))
    named = [n for n in tree.body if isinstance(n, Definition) and n.name == name]
    if named:
        return named[-1]
    imports = (node for node in tree.body if isinstance(node, ast.ImportFrom) and node.module)
    source = next(node.module for node in imports if name in {a.name for a in node.names})
    return _definition(source, name)


def _described(node: Definition) -> str:
    text = prose(ast.get_docstring(node) or "", _names(node))
    if isinstance(node, ast.ClassDef):
        return text
    return f"```python\n{_signature(node)}\n```\n\n{text}"


def _names(node: Definition) -> list[str]:
    """The arguments of a function, the fields of a class."""
    if isinstance(node, ast.ClassDef):
        return [ast.unparse(each.target) for each in node.body if isinstance(each, ast.AnnAssign)]
    return [each.arg for each in ast.walk(node.args) if isinstance(each, ast.arg)]


def _signature(node: ast.FunctionDef) -> str:
    arguments = node.args
    every = [*arguments.posonlyargs, *arguments.args]
    defaults = [None] * (len(every) - len(arguments.defaults)) + [*arguments.defaults]
    lines = [_argument(a, d) for a, d in zip(every, defaults, strict=True)]
    if arguments.kwonlyargs:
        lines.append("*")
    keywords = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    lines += [_argument(a, d) for a, d in keywords]
    if arguments.kwarg is not None:
        lines.append("**" + _argument(arguments.kwarg, None))
    inner = "".join(f"    {line},\n" for line in lines)
    result = "" if node.returns is None else f" -> {ast.unparse(node.returns)}"
    return f"def {node.name}({chr(10) if inner else ''}{inner}){result}: ..."


def _argument(argument: ast.arg, default: ast.expr | None) -> str:
    kind = "" if argument.annotation is None else f": {ast.unparse(argument.annotation)}"
    return argument.arg + kind + ("" if default is None else f" = {ast.unparse(default)}")


def prose(docstring: str, names: Sequence[str] = ()) -> str:
    """A docstring as Markdown: indented code stays, what is said of each of `names` is an item."""
    name = "|".join(names) or "(?!)"
    said = re.compile(rf"(?:^|(?<=\.) )({name})((?:, (?:{name}))*):\s", re.MULTILINE)
    parts = []
    for paragraph in docstring.split("\n\n"):
        if paragraph.startswith("    "):
            parts.append(f"```python\n{inspect.cleandoc(paragraph)}\n```")
            continue
        first, *items = said.sub(_item, re.sub(r"\n\s+", " ", paragraph)).split("\n- ")
        lines = [" ".join(item.split()) for item in items]
        parts += [" ".join(first.split())] * bool(first)
        parts += ["\n".join(f"- {line}" for line in lines)] * bool(lines)
    return "\n\n".join(parts) + "\n"


def _item(match: re.Match[str]) -> str:
    names = ", ".join(f"`{name}`" for name in (match[1] + match[2]).split(", "))
    return f"\n- {names}: "


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
