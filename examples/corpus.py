"""Write a small real corpus that every machine with Python has, for the walk-throughs.

    python examples/corpus.py text text.jsonl          # Python's help, a document a line
    python examples/corpus.py pairs pairs.jsonl        # words, and the same in capital letters
    python examples/corpus.py sentences pairs.jsonl    # two words: are both in capital letters?
    python examples/corpus.py pictures pictures.npz    # bytes of sources and of bytecode, 16 x 16

With your own data the files have the same form (docs/train.md).
"""

import argparse
import importlib.util
import json
import keyword
import marshal
import random
from pathlib import Path
from pydoc_data import topics

import numpy as np

MODULES = ("argparse", "ast", "inspect", "pathlib", "subprocess", "typing")


def words() -> list[str]:
    """Python's keywords and names of topics, in small letters."""
    return sorted({word.lower() for word in (*keyword.kwlist, *topics.topics) if word.isalpha()})


def text() -> list[dict[str, str]]:
    return [{"text": document} for document in topics.topics.values()]


def pairs() -> list[dict[str, str]]:
    return [{"source": word, "target": word.upper()} for word in words()]


def sentences() -> list[dict[str, str]]:
    generator, known, rows = random.Random(0), words(), []
    for _ in range(2000):
        first, second = generator.choice(known), generator.choice(known)
        both = generator.random() < 0.5
        capital = generator.random() < 0.5  # one of them, where it is not both
        rows.append(
            {
                "text": first.upper() if both or capital else first,
                "text_pair": second.upper() if both or not capital else second,
                "label": "both" if both else "one",
            }
        )
    return rows


def pictures(file: Path) -> None:
    """200 pictures of each kind: `images` [count, 16, 16] uint8, and `labels`."""
    kinds = {"source": b"", "bytecode": b""}
    for name in MODULES:
        spec = importlib.util.find_spec(name)
        source = Path(spec.origin).read_text()
        kinds["source"] += source.encode()
        kinds["bytecode"] += marshal.dumps(compile(source, name, "exec"))
    images = [np.frombuffer(k[: 256 * 200], np.uint8).reshape(-1, 16, 16) for k in kinds.values()]
    labels = np.repeat(list(kinds), [len(kind) for kind in images])
    np.savez(file, images=np.concatenate(images), labels=labels)


def main() -> None:
    parser = argparse.ArgumentParser(description="Write a small real corpus.")
    parser.add_argument("kind", choices=("text", "pairs", "sentences", "pictures"))
    parser.add_argument("file", type=Path)
    options = parser.parse_args()
    if options.kind == "pictures":
        pictures(options.file)
        return
    rows = {"text": text, "pairs": pairs, "sentences": sentences}[options.kind]()
    options.file.write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main()
