"""Train a byte-level BPE tokenizer on JSON lines.

python examples/gpt2_pretrain/tokenizer.py text.jsonl --vocabulary 512 --output tokenizer.json
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

END = "<|endoftext|>"
SPECIAL = (END, "<pad>", "<mask>", "<cls>", "<sep>")


def texts(files: list[Path], key: str) -> Iterator[str]:
    """The texts of all lines."""
    for path in files:
        with path.open(encoding="utf-8") as file:
            yield from (json.loads(line)[key] for line in file)


def train(documents: Iterator[str], vocabulary: int) -> Tokenizer:
    """A tokenizer of GPT-2's kind with that many tokens, the special ones among them."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        documents,
        trainers.BpeTrainer(
            vocab_size=vocabulary,
            special_tokens=list(SPECIAL),
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        ),
    )
    return tokenizer


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a byte-level BPE tokenizer.")
    parser.add_argument("files", nargs="+", type=Path, help="JSON lines")
    parser.add_argument("--key", default="text", help="of the text in a line's object")
    parser.add_argument("--vocabulary", type=int, default=50_257, help="tokens")
    parser.add_argument("--output", type=Path, default=Path("tokenizer.json"))
    options = parser.parse_args()
    tokenizer = train(texts(options.files, options.key), options.vocabulary)
    tokenizer.save(str(options.output))
    print(f"{options.output}: {tokenizer.get_vocab_size():,} tokens")


if __name__ == "__main__":
    main()
