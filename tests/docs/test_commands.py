"""Every command printed in a document exists, and understands what the document passes to it."""

from __future__ import annotations

import ast
import functools
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from graphaccel.cli import main as cli
from graphaccel.passes.pipeline import PIPELINE
from tests.support.documents import docs_script

ROOT = Path(__file__).parents[2]
DOCUMENTS = ["README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md", "tests/README.md"]
DOCUMENTS += sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("examples/*/README.md"))
DOCUMENTS += sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("docs/**/*.md"))


def _blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)


def _commands() -> list[tuple[str, str]]:
    """(document, command line) of every line in a block marked `sh`."""
    return [
        (document, line)
        for document in DOCUMENTS
        for block in _blocks((ROOT / document).read_text(encoding="utf-8"), "sh")
        for line in block.splitlines()
        if line.strip() and not line.lstrip().startswith("#")
    ]


COMMANDS = _commands()
PLANNED = ("plan", "calibrate", "bench")


@functools.cache
def _help(script: str) -> str:
    """What `script --help` prints."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "200"}
    result = subprocess.run(
        [sys.executable, script, "--help"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def _check_script(arguments: list[str]) -> None:
    """A script of ours that knows every option it is given."""
    script, *rest = arguments
    if script == "-m":
        module, *rest = rest
        script = module.replace(".", "/") + "/__main__.py"
    assert (ROOT / script).is_file()
    said = (ROOT / script).read_text(encoding="utf-8")
    for option in (word.split("=")[0] for word in rest if word.startswith("-")):
        if (
            f'("{option}"' in said
        ):  # as it is added to the parser: starting the script takes seconds
            continue
        assert re.search(rf"{option}\b", _help(script)), f"{script} has no {option}"


def _check_pytest(arguments: list[str]) -> None:
    for path in (word for word in arguments if word.startswith("tests")):
        assert (ROOT / path).exists()


def _elsewhere(arguments: list[str], folder: Path) -> list[str]:
    """The arguments with files that the command writes in another folder."""
    pairs = zip(["", *arguments], arguments, strict=False)
    return [str(folder / word) if before == "--output" else word for before, word in pairs]


def _with_text(arguments: list[str], folder: Path) -> list[str]:
    """The arguments with a text and a tokenizer that exist."""
    from tokenizers import Tokenizer, models

    (folder / "text.jsonl").write_text('{"text": "word"}\n')
    vocabulary = {"word": 0, "<|endoftext|>": 1}
    Tokenizer(models.WordLevel(vocabulary)).save(str(folder / "tokenizer.json"))
    made = {file.name: str(file) for file in folder.iterdir()}
    return [made.get(word, word) for word in arguments]


def _trained_small(arguments: list[str], folder: Path) -> list[str]:
    """The arguments with a model and a text that take no time to train; in this process."""
    (folder / "text.jsonl").write_text('{"text": "some words to learn"}\n' * 20)
    small = [str(folder / word) if word == "text.jsonl" else word for word in arguments]
    sizes = [word for field in ("n_layer=1", "n_embd=8", "n_head=2") for word in ("--set", field)]
    few = ["--steps", "1", "--length", "8", "--global-batch", "2", "--eval-batches", "1"]
    return [*small, *sizes, *few, "--output", str(folder / "trained")]


def _check_graphaccel(arguments: list[str], folder: Path) -> None:
    if "--help" in arguments:
        with pytest.raises(SystemExit, match="0"):
            cli.main(arguments)
        return
    parsed = cli.build_parser().parse_args(arguments)
    if arguments[0] == "tokenize":
        arguments = _with_text(arguments, folder)
    if arguments[0] == "train":
        if parsed.config is None:  # a file of settings is read by tests/training/test_settings.py
            assert cli.main(_trained_small(arguments, folder)) == 0
    elif arguments[0] == "run":
        _check_script([parsed.script, *parsed.arguments])
    elif (
        arguments[0] in ("plan", "calibrate", "bench") and getattr(parsed, "compare", None) is None
    ):
        path, function = parsed.target  # tests/cli/test_plan_measure.py runs them, on small models
        assert re.search(rf"^def {function}\(\)", path.read_text(), flags=re.MULTILINE)
    elif arguments[0] != "plan":
        assert cli.main(_elsewhere(arguments, folder)) == 0


def _check(words: list[str], folder: Path) -> None:
    program, *arguments = words
    program = program.removeprefix(".venv/bin/")
    if program == "make":
        subprocess.run(["make", "-n", *arguments], cwd=ROOT, check=True, capture_output=True)
    elif program == "graphaccel":
        _check_graphaccel(arguments, folder)
    elif program == "python" and arguments[:2] == ["-m", "pytest"]:
        _check_pytest(arguments[2:])
    elif program == "python":
        _check_script(arguments)
    elif program == "pip":
        assert arguments in (["install", "."], ["install", "-e", "."], ["install", ".[ort]"])
    elif program in ("ruff", "lint-imports"):
        assert arguments in ([], ["format", "."], ["check", "."])
    else:
        assert os.access(ROOT / program, os.X_OK), f"no check for {program}: write one here"


def test_there_are_commands_in_the_documents() -> None:
    assert ("README.md", "make demo") in COMMANDS
    assert ("README.md", "make test") in COMMANDS


@pytest.mark.parametrize(("document", "command"), COMMANDS, ids=[c for _, c in COMMANDS])
def test_command(
    document: str, command: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(ROOT)
    _check(shlex.split(command), tmp_path)


def test_what_a_command_writes_goes_elsewhere() -> None:
    words = ["calibrate", "f.py:job", "--output", "cluster.json"]
    assert _elsewhere(words, Path("t")) == ["calibrate", "f.py:job", "--output", "t/cluster.json"]


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_lead_to_files(document: str) -> None:
    text = (ROOT / document).read_text(encoding="utf-8")
    links = [link for link in re.findall(r"\]\(([^)#]+)\)", text) if "://" not in link]
    missing = [link for link in links if not (ROOT / document).parent.joinpath(link).exists()]
    assert missing == []


@pytest.mark.parametrize("document", DOCUMENTS)
def test_python_blocks_are_python(document: str) -> None:
    for block in _blocks((ROOT / document).read_text(encoding="utf-8"), "python"):
        source = re.sub(r"^>>> ", "", block, flags=re.MULTILINE)
        ast.parse(source, document)


def test_folders_of_the_map_exist_and_are_complete() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    table = text.split("## Folders")[1].split("At the top level")[0]
    named = set(re.findall(r"^\| `(\w+)/`", table, flags=re.MULTILINE)) | {"compat"}
    package = ROOT / "graphaccel"
    assert {path.parent.name for path in package.glob("*/__init__.py")} == named


def test_the_page_of_modules_is_that_of_the_source() -> None:
    module = docs_script("modules")
    assert module.PAGE.read_text(encoding="utf-8") == module.page(), "run python docs/modules.py"


def test_the_map_lists_every_pass_in_order() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    named = re.findall(r"^\| `(\w+)` \|", text, flags=re.M)
    assert named == [each.name for each in PIPELINE]


def test_the_sample_plan_is_what_is_printed(capsys: pytest.CaptureFixture) -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    sample = text.split("<!-- sample -->\n```text\n")[1].split("\n```\n<!-- end: sample -->")[0]
    command = ["plan", "examples/gpt2/demo.py:job", "--device", "h100-80gb", "--devices", "8"]
    assert cli.main([*command, "--batch", "64"]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert [line for line in sample.splitlines() if line not in printed] == []
