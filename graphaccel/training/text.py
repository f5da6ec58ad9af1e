"""Rows of text for each task: packed tokens, masked tokens, labelled texts and pairs."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset
from transformers.tokenization_utils_tokenizers import PreTrainedTokenizerFast

from graphaccel.data.packed import PackedTokens
from graphaccel.data.sentences import SentencePairs, SpecialTokens
from graphaccel.data.token_file import TokenFile
from graphaccel.data.tokenize import bad_line, tokenize
from graphaccel.errors import BadData, BadTraining
from graphaccel.training.settings import Settings
from graphaccel.training.table import Table

IGNORED = -100
END = "<|endoftext|>"
_USUAL_NAMES = {
    "bos_token": (END, "<s>"),
    "eos_token": (END, "</s>"),
    "pad_token": ("<pad>", "[PAD]"),
    "mask_token": ("<mask>", "[MASK]"),
    "cls_token": ("<cls>", "[CLS]", "<s>"),
    "sep_token": ("<sep>", "[SEP]", "</s>"),
    "unk_token": ("<unk>", "[UNK]"),
}
_WORTH_A_PROCESS = 16 << 20
"""Bytes of text."""


def load_tokenizer(settings: Settings) -> PreTrainedTokenizerFast:
    """The tokenizer that the settings name, or that of the model's folder; it can pad.

    Raises BadTraining (GA418) where there is none.
    """
    if settings.tokenizer == "bytes":
        return _bytes()
    place = Path(settings.tokenizer or settings.model)
    file = place / "tokenizer.json" if place.is_dir() else place
    if (settings.tokenizer is None and not file.is_file()) or file.suffix != ".json":
        raise BadTraining(
            what="there is no tokenizer", help_line="--tokenizer tokenizer.json | --tokenizer bytes"
        )
    if not file.is_file():
        raise BadTraining(what=f"there is no tokenizer `{file}`", help_line="--tokenizer bytes")
    if place.is_dir() and (place / "tokenizer_config.json").is_file():
        result = PreTrainedTokenizerFast.from_pretrained(place)
    else:
        result = _with_names(PreTrainedTokenizerFast(tokenizer_file=str(file)))
    if result.pad_token is None:
        result.pad_token = result.eos_token or next(iter(result.get_vocab()))
    return result


def _with_names(tokenizer: PreTrainedTokenizerFast) -> PreTrainedTokenizerFast:
    """The tokenizer of a bare `tokenizer.json`, with its special tokens, by their usual
    names."""
    known = tokenizer.get_vocab()
    by_role = {
        role: next((name for name in names if name in known), None)
        for role, names in _USUAL_NAMES.items()
        if getattr(tokenizer, role) is None
    }
    tokenizer.add_special_tokens({role: name for role, name in by_role.items() if name})
    return tokenizer


def _bytes() -> PreTrainedTokenizerFast:
    """A token for each byte, and the special ones behind them."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([END, "<pad>", "<mask>"])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END, bos_token=END, pad_token="<pad>",
        mask_token="<mask>",
    )  # fmt: skip


def token_rows(
    settings: Settings, paths: Sequence[str], tokenizer: PreTrainedTokenizerFast, name: str
) -> PackedTokens | SentencePairs:
    """Rows of `settings.length` tokens of token files, or of JSON lines that are tokenized first.

    name: of the token file that is written into the output folder, unless it is newer than the
    text. Raises BadData (GA417) as `tokenize` does.
    """
    lines = [Path(path) for path in paths if path.endswith((".jsonl", ".json"))]
    if not lines:
        if len(paths) > 1:
            raise BadTraining(
                what="more than one file of tokens is given",
                help_line=f"--data {paths[0]} (or the JSON lines of all of them)",
            )
        return _rows(settings, tokenizer, paths[0])
    prefix = settings.output / (f"{name}-sentences" if settings.next_sentence else name)
    if not _newer(prefix, lines):
        settings.output.mkdir(parents=True, exist_ok=True)
        tokenizer.save_pretrained(settings.output)
        tokenize(
            lines,
            settings.output,
            prefix,
            end=_end(settings, tokenizer),
            workers=_workers(lines),
            skip_bad_lines=settings.skip_bad_lines,
            split_sentences=settings.next_sentence,
        )
    return _rows(settings, tokenizer, prefix)


def _end(settings: Settings, tokenizer: PreTrainedTokenizerFast) -> str | None:
    given = None if settings.next_sentence else tokenizer.eos_token
    return str(given) if given else None


def _workers(files: Sequence[Path]) -> int:
    """Processes that tokenize: to start one takes as long as some megabytes do."""
    size = sum(file.stat().st_size for file in files if file.is_file())
    return max(1, min(8, os.cpu_count() or 1, size // _WORTH_A_PROCESS))


def _rows(
    settings: Settings, tokenizer: PreTrainedTokenizerFast, prefix: str | Path
) -> PackedTokens | SentencePairs:
    if settings.next_sentence:
        return SentencePairs(
            TokenFile(prefix),
            settings.length,
            special_tokens(tokenizer),
            short=settings.short_sequence_probability,
            seed=settings.seed,
        )
    masked, causal = settings.reset_documents, settings.task == "causal-lm"
    return PackedTokens(TokenFile(prefix), settings.length, masked=masked, causal=causal)


def _newer(prefix: Path, sources: Sequence[Path]) -> bool:
    written = prefix.with_name(prefix.name + ".idx")
    if not written.is_file() or not all(source.is_file() for source in sources):
        return False
    return written.stat().st_mtime > max(source.stat().st_mtime for source in sources)


def special_tokens(tokenizer: PreTrainedTokenizerFast) -> SpecialTokens:
    """The tokens around pairs of sentences; one that ends documents stands for those missing.

    Raises BadTraining (GA418) where there is none of them.
    """
    other: Any = tokenizer.eos_token_id
    given: Any = tokenizer.cls_token_id, tokenizer.sep_token_id, tokenizer.pad_token_id
    ids = [other if token is None else token for token in given]
    if None in ids:
        raise BadTraining(
            what="the tokenizer has no tokens to begin and to separate sentences with",
            help_line="--tokenizer bytes, or one with cls_token and sep_token",
        )
    return SpecialTokens(*ids)


@dataclass(frozen=True)
class Selected(Dataset):
    """Rows of another data set with some of their tensors only."""

    rows: Table
    names: frozenset[str]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, row: int) -> dict[str, torch.Tensor]:
        return {name: value for name, value in self.rows[row].items() if name in self.names}


class MaskedTokens(Dataset):
    """Rows in which a share of the tokens is to be predicted, as BERT is trained: of these 80 % are
    the mask token, 10 % another one, 10 % unchanged. The choice depends on seed, epoch and row
    alone: it is the same on every rank, and in a run that resumes.

    kept: tokens that are never to be predicted, such as padding.

    Raises BadTraining (GA418) where the tokenizer has no mask token.
    """

    def __init__(
        self,
        rows: Table,
        tokenizer: PreTrainedTokenizerFast,
        share: float,
        seed: int,
        kept: Sequence[int] = (),
    ) -> None:
        if tokenizer.mask_token_id is None:
            raise BadTraining(what="the tokenizer has no mask token", help_line="--tokenizer bytes")
        self.rows, self.share, self.seed, self.epoch = rows, share, seed, 0
        self._kept = torch.tensor(kept, dtype=torch.int64)
        self._mask, self._words = torch.tensor(tokenizer.mask_token_id), len(tokenizer)

    def set_epoch(self, epoch: int) -> None:
        """Other masks in each epoch."""
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, row: int) -> dict[str, torch.Tensor]:
        given = dict(self.rows[row])
        ids = given["input_ids"]
        generator = torch.Generator().manual_seed(hash((self.seed, self.epoch, row)) % 2**63)
        words = ~torch.isin(ids, self._kept)
        chosen = (torch.rand(ids.shape, generator=generator) < self.share) & words
        if not chosen.any():  # a row without a token to predict has no loss
            places = words.nonzero()[:, 0]
            chosen[places[torch.randint(len(places), (1,), generator=generator)]] = True
        how = torch.rand(ids.shape, generator=generator)
        others = torch.randint(self._words, ids.shape, generator=generator)
        masked = torch.where(how < 0.8, self._mask, torch.where(how < 0.9, others, ids))
        given["labels"] = ids.masked_fill(~chosen, IGNORED)
        given["input_ids"] = torch.where(chosen, masked, ids)
        return given


class Examples(Dataset):
    """Examples of JSON lines, made into tensors one at a time."""

    def __init__(self, examples: Sequence[Any], make: Callable[[Any], dict[str, Any]]) -> None:
        self.examples, self.make = examples, make

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, row: int) -> dict[str, torch.Tensor]:
        return {name: torch.as_tensor(value) for name, value in self.make(row).items()}


def read_examples(paths: Sequence[str], keys: Sequence[str], skip: bool) -> list[dict[str, Any]]:
    """The objects of JSON lines, each of which has these keys.

    skip: leave out lines that are no such object. Raises BadData (GA417) with file and line.
    """
    results = [example for path in paths for example in _lines(Path(path), keys, skip)]
    if not results:
        raise BadData(place=", ".join(paths), reason="it has no example", help_line="")
    return results


def _lines(path: Path, keys: Sequence[str], skip: bool) -> Iterator[dict[str, Any]]:
    if not path.is_file():
        raise BadData(place=str(path), reason="there is no such file")
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            example, reason = _example(line, keys)
            if not reason:
                yield example
            elif not skip:
                raise bad_line(str(path), number, reason)


def _example(line: str, keys: Sequence[str]) -> tuple[Any, str]:
    """The object of a line, and what is wrong with it, if anything."""
    try:
        example = json.loads(line)
    except ValueError as error:
        return None, str(error)
    if not isinstance(example, dict):
        return None, "it is no object"
    missing = [key for key in keys if key not in example]
    return example, f"it has no {missing[0]!r}" if missing else ""


def classified(
    examples: Sequence[Mapping[str, Any]],
    tokenizer: PreTrainedTokenizerFast,
    length: int,
    numbers: Mapping[str, int],
) -> Examples:
    """Texts, or pairs of texts, with the number of their class; padded to `length` tokens.

    Raises BadData (GA417) for a label that `numbers` does not have.
    """
    for example in examples:
        if str(example["label"]) not in numbers:
            raise BadData(
                place=json.dumps(example)[:60],
                reason=f"its label {example['label']!r} is none of the {len(numbers)} classes",
            )

    def make(row: int) -> dict[str, Any]:
        example = examples[row]
        encoded = tokenizer(
            example["text"], example.get("text_pair"), padding="max_length", truncation=True,
            max_length=length,
        )  # fmt: skip
        return {**encoded, "labels": numbers[str(example["label"])]}

    return Examples(examples, make)


def translated(
    examples: Sequence[Mapping[str, Any]], tokenizer: PreTrainedTokenizerFast, length: int
) -> Examples:
    """Pairs of `source` and `target`, each padded to `length` tokens."""

    def make(row: int) -> dict[str, Any]:
        example = examples[row]
        settings = {"padding": "max_length", "truncation": True, "max_length": length}
        encoded = tokenizer(example["source"], **settings)
        end = tokenizer.eos_token or ""
        target = tokenizer(example["target"] + end, **settings)
        labels = torch.as_tensor(target["input_ids"])
        labels = labels.masked_fill(torch.as_tensor(target["attention_mask"]) == 0, IGNORED)
        return {
            "input_ids": encoded["input_ids"],
            "attention_mask": encoded["attention_mask"],
            "labels": labels,
        }

    return Examples(examples, make)
