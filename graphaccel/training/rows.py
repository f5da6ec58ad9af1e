"""Makes the training and validation rows of a task, and what the model's configuration needs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import Subset
from transformers.configuration_utils import PretrainedConfig
from transformers.tokenization_utils_tokenizers import PreTrainedTokenizerFast

from graphaccel.errors import BadTraining
from graphaccel.training import images, models, text
from graphaccel.training.settings import Settings, model_task
from graphaccel.training.table import Table

_TEXTS = {"sequence-classification": ("text", "label"), "seq2seq": ("source", "target")}


@dataclass(frozen=True)
class Rows:
    """What a model is trained and evaluated on. tokenizer: None for pictures."""

    train: Table
    validation: Table
    tokenizer: PreTrainedTokenizerFast | None


def make_rows(settings: Settings, config: PretrainedConfig) -> Rows:
    """The rows of a task; the configuration gets the number of tokens or classes of the data.

    Raises BadData (GA417) for files that can not be used, BadTraining (GA418) where data and model
    do not fit, or the data gives a field another value than the settings do.
    """
    chosen = {name: getattr(config, name) for name, _ in settings.model_settings}
    rows = _rows(settings, config)
    for name, value in chosen.items():
        of_data = getattr(config, name)
        if of_data != value:
            raise BadTraining(
                what=f"`{name}` is set to {value}, and with this data it is {of_data}",
                help_line=f"--set {name}={of_data}"
                if isinstance(of_data, int)
                else f"leave --set {name} out",
            )
    return rows


def _rows(settings: Settings, config: PretrainedConfig) -> Rows:
    if settings.task == "image-classification":
        return _of_pictures(settings, config)
    tokenizer = text.load_tokenizer(settings)
    chosen = "vocab_size" in dict(settings.model_settings)
    models.fit_vocabulary(config, settings.model, len(tokenizer), settings.length, chosen=chosen)
    if settings.task in _TEXTS:
        return _of_examples(settings, config, tokenizer)
    return _of_tokens(settings, config, tokenizer)


def _of_tokens(
    settings: Settings, config: PretrainedConfig, tokenizer: PreTrainedTokenizerFast
) -> Rows:
    names = _inputs(settings, config)
    packed = text.token_rows(settings, settings.data, tokenizer, "train")
    if settings.validation:
        other = text.token_rows(settings, settings.validation, tokenizer, "validation")
        parts: tuple[Table, Table] = (packed, other)
    else:
        parts = _split_in_order(packed, settings.split)
    train, validation = (text.Selected(part, frozenset(names)) for part in parts)
    if settings.task == "causal-lm":
        return Rows(train, validation, tokenizer)
    share, seed = settings.mask_probability, settings.seed
    kept = text.special_tokens(tokenizer).all if settings.next_sentence else ()
    return Rows(
        text.MaskedTokens(train, tokenizer, share, seed, kept),
        text.MaskedTokens(validation, tokenizer, share, seed, kept),
        tokenizer,
    )


def _inputs(settings: Settings, config: PretrainedConfig) -> set[str]:
    """The tensors of a row that the model takes.

    Raises BadTraining (GA418) where it does not take what the settings need.
    """
    forward = models.forward_of(model_task(settings), config)
    known = set(inspect.signature(forward).parameters)
    needed, option = set[str](), ""
    if settings.reset_documents:
        needed, option = {"position_ids", "attention_mask"}, "--reset-documents"
    if settings.next_sentence:
        needed = {"next_sentence_label", "token_type_ids", "attention_mask"}
        option = "--next-sentence"
    if missing := needed - known:
        raise BadTraining(
            what=f"a `{config.model_type}` takes no {min(missing)}", help_line=f"leave {option} out"
        )
    return {"input_ids", "labels"} | needed


def _split_in_order(rows: Any, shares: str) -> tuple[Table, Table]:
    first, second = _shares(shares)
    cut = round(first / (first + second) * len(rows))
    return Subset(rows, range(cut)), Subset(rows, range(cut, len(rows)))


def _of_examples(
    settings: Settings, config: PretrainedConfig, tokenizer: PreTrainedTokenizerFast
) -> Rows:
    keys, skip = _TEXTS[settings.task], settings.skip_bad_lines
    config.pad_token_id = tokenizer.pad_token_id
    examples, others = _parts(settings, lambda paths: text.read_examples(paths, keys, skip))
    if settings.task == "seq2seq":
        if getattr(config, "decoder_start_token_id", None) is None:
            config.decoder_start_token_id = tokenizer.pad_token_id
        train, validation = (
            text.translated(part, tokenizer, settings.length) for part in (examples, others)
        )
        return Rows(train, validation, tokenizer)
    numbers = _numbers(
        config, settings, [e["label"] for e in examples], [e["label"] for e in others]
    )
    train, validation = (
        text.classified(part, tokenizer, settings.length, numbers) for part in (examples, others)
    )
    return Rows(train, validation, tokenizer)


def _of_pictures(settings: Settings, config: PretrainedConfig) -> Rows:
    def read(paths: Sequence[str]) -> list[tuple[Any, str]]:
        return list(zip(*images.read_pictures(paths), strict=True))

    pictures, others = _parts(settings, read)
    numbers = _numbers(
        config, settings, [label for _, label in pictures], [label for _, label in others]
    )
    size = getattr(config, "image_size", 224)
    high, wide = size if isinstance(size, (list, tuple)) else (size, size)
    shape = (getattr(config, "num_channels", 3), high, wide)

    def rows(part: Sequence[tuple[Any, str]]) -> Table:
        return images.Pictures(
            [picture for picture, _ in part], [label for _, label in part], numbers, shape
        )

    return Rows(rows(pictures), rows(others), None)


def _parts(settings: Settings, read: Callable[[Sequence[str]], list[Any]]) -> tuple[list, list]:
    """Examples to train and to evaluate on; those of one source are shuffled before it is cut."""
    examples = read(settings.data)
    if settings.validation:
        return examples, read(settings.validation)
    first, second = _shares(settings.split)
    generator = torch.Generator().manual_seed(settings.seed)
    order = torch.randperm(len(examples), generator=generator).tolist()
    cut = round(first / (first + second) * len(order))
    return [examples[i] for i in order[:cut]], [examples[i] for i in order[cut:]]


def _shares(text: str) -> tuple[float, float]:
    try:
        first, second = (float(part) for part in text.split(","))
    except ValueError:
        first = second = -1.0
    if not (first > 0 and second >= 0 and first + second < float("inf")):
        raise BadTraining(what=f"`{text}` are no two shares", help_line="--split 95,5")
    return first, second


def _numbers(
    config: PretrainedConfig, settings: Settings, labels: Sequence[Any], others: Sequence[Any]
) -> Mapping[str, int]:
    """Numbers of the classes: those of the model's folder if they fit, else in their order.

    others: labels to evaluate on, which may have further classes where they are a part of the same
    data.
    """
    names = {str(label) for label in (labels if settings.validation else [*labels, *others])}
    known = models.known_labels(config, settings.model)
    if known is not None and names <= set(known):
        return known
    in_order = sorted(names, key=lambda name: (int(name) if name.isdecimal() else 0, name))
    models.labels_of(config, in_order)
    return {name: number for number, name in enumerate(in_order)}
