"""Rows of text for each task: packed tokens, masked tokens, labelled texts and pairs."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset
from transformers.tokenization_utils_tokenizers import PreTrainedTokenizerFast

from graphaccel.data.json_lines import (
    ENDINGS,
    bad_line,
    check_file,
    lines_of,
    object_of,
    text_of,
)
from graphaccel.data.packed import PackedTokens
from graphaccel.data.sentences import SentencePairs, SpecialTokens
from graphaccel.data.token_file import TokenFile
from graphaccel.data.tokenize import tokenize
from graphaccel.errors import BadData, BadTraining
from graphaccel.progress import progress
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
    try:
        if place.is_dir() and (place / "tokenizer_config.json").is_file():
            result = PreTrainedTokenizerFast.from_pretrained(place)
        else:
            result = _with_names(PreTrainedTokenizerFast(tokenizer_file=str(file)))
    except Exception as error:  # tokenizers has no class of its own
        raise BadTraining(
            what=f"`{file}` is no tokenizer of the `tokenizers` library",
            why=(str(error).strip().splitlines() or [type(error).__name__])[0],
            help_line="--tokenizer bytes",
        ) from None
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

    name: of the token file that is written into the output folder, unless it is there, of the same
    text and tokenizer. Raises BadData (GA417) as `tokenize` does, BadTraining (GA418) where some
    of the files are no JSON lines.
    """
    lines = [Path(path) for path in paths if path.endswith(ENDINGS)]
    for path in paths:
        if Path(path) not in lines:
            _check_prefix(path, lines)
    if not lines:
        if len(paths) > 1:
            raise BadTraining(
                what="more than one file of tokens is given",
                help_line=f"--data {paths[0]} (or the JSON lines of all of them)",
            )
        return _rows(settings, tokenizer, paths[0])
    prefix = settings.output / (f"{name}-sentences" if settings.next_sentence else name)
    record, source = prefix.with_name(prefix.name + ".json"), _source(settings, tokenizer, lines)
    if not (_has(prefix) and record.is_file() and record.read_text() == source):
        settings.output.mkdir(parents=True, exist_ok=True)
        record.unlink(missing_ok=True)  # a run that is killed meanwhile leaves none
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
        record.write_text(source)
    if not TokenFile(prefix).lengths.any():
        raise BadData(place=", ".join(map(str, lines)), reason="there is no text in it")
    return _rows(settings, tokenizer, prefix)


def _has(prefix: Path) -> bool:
    return all(prefix.with_name(prefix.name + end).is_file() for end in (".bin", ".idx"))


def _check_prefix(path: str, lines: Sequence[Path]) -> None:
    """Raises BadData (GA417) for a file that is neither JSON lines nor one of tokens, BadTraining
    (GA418) for one of tokens beside `lines`."""
    if not _has(Path(path.removesuffix(".bin").removesuffix(".idx"))) and Path(path).exists():
        check_file(Path(path))
        to_lines = "import json, sys; [print(json.dumps(dict(text=t))) for t in sys.stdin]"
        raise BadData(
            place=path,
            reason="it is no JSON lines (a name that ends in .jsonl), and no prefix of token files",
            help_line=f"a document a line of text:  python -c '{to_lines}' < {path} > text.jsonl",
        )
    if lines:
        raise BadTraining(
            what=f"`{path}` is no JSON lines, as `{lines[0]}` is",
            help_line=f"--data {' '.join(map(str, lines))}",
        )


def _source(settings: Settings, tokenizer: PreTrainedTokenizerFast, lines: Sequence[Path]) -> str:
    """What tokens are made of, to know whether those that are there are these."""
    for line in lines:
        check_file(line)
    files = [(str(line.resolve()), line.stat().st_size, line.stat().st_mtime_ns) for line in lines]
    rules = hashlib.sha256(tokenizer.backend_tokenizer.to_str().encode()).hexdigest()
    skip = settings.skip_bad_lines
    return json.dumps({"files": files, "tokenizer": rules, "skip_bad_lines": skip}, indent=1)


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

    skip: leave out lines that are no such object, and say how many. Raises BadData (GA417) with
    file and line.
    """
    started = time.perf_counter()
    bad = Counter[str]()
    results = [example for path in paths for example in _lines(Path(path), keys, skip, bad)]
    if skip:
        text = f"{len(results):,} examples, {bad.total()} lines skipped"
        progress("read", text, time.perf_counter() - started)
    if not results:
        raise BadData(place=", ".join(paths), reason="it has no example", help_line="")
    return results


def _lines(
    path: Path, keys: Sequence[str], skip: bool, bad: Counter[str]
) -> Iterator[dict[str, Any]]:
    """bad: counts the lines that are left out, by their reason."""
    for number, line in lines_of(path):
        try:
            yield _example(line, keys)
        except ValueError as error:
            if not skip:
                raise bad_line(str(path), number, str(error)) from None
            bad[str(error)] += 1


def _example(line: bytes, keys: Sequence[str]) -> dict[str, Any]:
    """The object of a line. Raises ValueError, saying what is wrong with it."""
    example = object_of(line)
    pair = () if example.get("text_pair") is None else ("text_pair",)
    for key in (*keys, *pair):
        if key != "label":
            text_of(example, key)
        elif key not in example:
            raise ValueError(f"it has no {key!r}")
        elif not isinstance(example[key], (str, int, float)) or example[key] != example[key]:
            raise ValueError(f"its 'label' is {json.dumps(example[key])[:40]}, no class")
    return example


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
