"""Rows of each task, beside what is laid out by hand; files that can not be used."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from tokenizers import Tokenizer, models

from graphaccel.errors import BadData, BadTraining
from graphaccel.training import images, text
from graphaccel.training.models import read_config
from graphaccel.training.rows import make_rows
from graphaccel.training.settings import Settings
from graphaccel.training.table import FirstRows
from tests.training.corpora import write_lines

BYTES = Settings(task="causal-lm", model="gpt2", data=(), tokenizer="bytes", length=8)
TOKENIZER = text.load_tokenizer(BYTES)


def settings(**changes: Any) -> Settings:
    return dataclasses.replace(BYTES, **changes)


def test_a_byte_is_a_token_and_comes_back() -> None:
    words = "naïve  Ωmega\n\ttab"
    ids = TOKENIZER(words).input_ids
    assert (len(ids), TOKENIZER.decode(ids)) == (len(words.encode()), words)


def test_masks_depend_on_seed_epoch_and_row_alone() -> None:
    rows = [{"input_ids": torch.arange(40) + i} for i in range(50)]
    first, again = (text.MaskedTokens(rows, TOKENIZER, 0.3, seed=1) for _ in range(2))
    for i in (7, 3, 7):
        assert all(torch.equal(first[i][name], again[i][name]) for name in first[i])
    chosen = torch.stack([first[i]["labels"] != text.IGNORED for i in range(50)])
    assert chosen.float().mean() == pytest.approx(0.3, abs=0.05)
    for i in range(50):
        labels, ids = first[i]["labels"], first[i]["input_ids"]
        assert torch.equal(labels[chosen[i]], rows[i]["input_ids"][chosen[i]])
        assert torch.equal(ids[~chosen[i]], rows[i]["input_ids"][~chosen[i]])
    masked = torch.stack([first[i]["input_ids"] == TOKENIZER.mask_token_id for i in range(50)])
    assert masked.sum() / chosen.sum() == pytest.approx(0.8, abs=0.05)
    first.set_epoch(1)
    assert not torch.equal(first[3]["labels"], again[3]["labels"])


def test_masks_of_a_part_of_the_rows_change_with_the_epoch() -> None:
    rows = [{"input_ids": torch.arange(40) + i} for i in range(5)]
    part = FirstRows(text.MaskedTokens(rows, TOKENIZER, 0.3, seed=1), 4)
    before = part[3]["labels"]
    part.set_epoch(1)
    assert not torch.equal(part[3]["labels"], before)
    FirstRows(rows, 4).set_epoch(1)  # rows that know no epochs


def test_a_row_without_a_chosen_token_gets_one() -> None:
    rows = text.MaskedTokens([{"input_ids": torch.arange(8)}], TOKENIZER, 0.0, seed=0)
    assert (rows[0]["labels"] != text.IGNORED).sum() == 1


def test_text_is_tokenized_once(tmp_path: Path) -> None:
    data = write_lines(tmp_path / "text.jsonl", [{"text": "abcdefghij"}] * 4)
    chosen = settings(data=(str(data),), output=tmp_path / "out", split="50,50")
    config = transformers.GPT2Config(n_positions=8)
    rows = make_rows(chosen, config)
    written = (tmp_path / "out" / "train.bin").stat().st_mtime_ns
    assert (len(rows.train), len(rows.validation)) == (2, 3)  # 44 tokens are 5 rows
    assert set(rows.train[0]) == {"input_ids", "labels"}
    make_rows(chosen, config)
    assert (tmp_path / "out" / "train.bin").stat().st_mtime_ns == written


def test_files_without_text_are_named(tmp_path: Path) -> None:
    data = write_lines(tmp_path / "text.jsonl", [])
    with pytest.raises(BadData) as caught:
        make_rows(settings(data=(str(data),), output=tmp_path / "out"), transformers.GPT2Config())
    assert caught.value.place == str(data)


@pytest.mark.parametrize(
    ("name", "typed", "help_line"),
    [
        ("num_labels", "2", "--set num_labels=3"),
        ("id2label", "{0: 'x', 1: 'y', 2: 'z'}", "leave --set id2label out"),
        ("pad_token_id", "7", f"--set pad_token_id={TOKENIZER.pad_token_id}"),
        ("eos_token_id", "500", f"--set eos_token_id={len(TOKENIZER) - 1}"),
        ("num_labels", "3", None),
    ],
)
def test_a_field_that_the_data_decides_is_not_another(
    name: str, typed: str, help_line: str | None, tmp_path: Path
) -> None:
    """It was left out without a word."""
    lines = [{"text": "a", "label": label} for label in (0, 1, 2) * 4]
    chosen = settings(
        task="sequence-classification",
        data=(str(write_lines(tmp_path / "a.jsonl", lines)),),
        model_settings=((name, typed),),
    )
    config = read_config("gpt2", chosen.model_settings)
    if help_line is None:
        make_rows(chosen, config)
        assert config.num_labels == 3
        return
    with pytest.raises(BadTraining, match=f"`{name}` is set to ") as caught:
        make_rows(chosen, config)
    assert f"help: {help_line}\n" in str(caught.value)


@pytest.mark.parametrize("what", ["text", "tokenizer", "files"])
def test_other_text_is_tokenized_again(what: str, tmp_path: Path) -> None:
    """Also where it is older than the tokens that are there."""
    data = [
        write_lines(tmp_path / f"{i}.jsonl", [{"text": word * 9}] * 4)
        for i, word in enumerate("ab")
    ]
    chosen = settings(data=(str(data[0]),), output=tmp_path / "out")
    other = dataclasses.replace(chosen, data=(str(data[1]),))
    if what == "tokenizer":
        Tokenizer(models.WordLevel({"a" * 9: 3, "?": 0}, unk_token="?")).save(
            str(tmp_path / "t.json")
        )
        other = dataclasses.replace(chosen, tokenizer=str(tmp_path / "t.json"), length=2)
    elif what == "files":
        other = dataclasses.replace(chosen, data=(str(data[1]), str(data[0])))
    config = transformers.GPT2Config(n_positions=8)
    before = make_rows(chosen, config).train[0]["input_ids"]
    fresh = make_rows(dataclasses.replace(other, output=tmp_path / "fresh"), config).train[0]
    again = make_rows(other, config).train[0]["input_ids"]
    assert not torch.equal(again, before)
    assert torch.equal(again, fresh["input_ids"])


def test_a_class_of_one_example_is_known_wherever_the_data_is_cut(tmp_path: Path) -> None:
    data = write_lines(tmp_path / "a.jsonl", [{"text": "a", "label": f"{i}"} for i in range(8)])
    chosen = settings(
        task="sequence-classification", model="bert", data=(str(data),), split="50,50"
    )
    config = transformers.BertConfig()
    rows = make_rows(chosen, config)
    assert config.num_labels == 8
    seen = sorted(
        int(part[i]["labels"]) for part in (rows.train, rows.validation) for i in range(4)
    )
    assert seen == [*range(8)]


def test_labelled_pairs_are_padded() -> None:
    examples = [{"text": "ab", "text_pair": "c", "label": 1}]
    row = text.classified(examples, TOKENIZER, 8, {"0": 0, "1": 1})[0]
    assert row["labels"] == 1
    assert row["attention_mask"].tolist() == [1, 1, 1, 0, 0, 0, 0, 0]


def test_targets_end_and_their_padding_is_ignored() -> None:
    row = text.translated([{"source": "ab", "target": "AB"}], TOKENIZER, 5)[0]
    assert row["labels"].tolist() == [
        *TOKENIZER("AB").input_ids,
        TOKENIZER.eos_token_id,
        -100,
        -100,
    ]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{", "Expecting property name"),
        ('{"text": "a"}', "it has no 'label'"),
        ("3", "no object"),
        ("[]", "an array"),
        ("[" * 100_000, "nested too deeply"),
        ('{"text": 5, "label": 0}', "its 'text' is 5, no text"),
        ('{"text": "\\ud800", "label": 0}', "half of a character"),
        ('{"text": "a", "text_pair": [], "label": 0}', "its 'text_pair' is [], no text"),
        ('{"text": "a", "label": null}', "its 'label' is null, no class"),
        ('{"text": "a", "label": NaN}', "its 'label' is NaN, no class"),
    ],
)
def test_a_bad_line_is_named_or_counted(
    line: str, reason: str, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    file = tmp_path / "lines.jsonl"
    file.write_text(json.dumps({"text": "a", "label": 0}) + "\n" + line + "\n")
    with pytest.raises(BadData) as caught:
        text.read_examples([str(file)], ("text", "label"), skip=False)
    assert f"{file}:2" in str(caught.value)
    assert reason in str(caught.value)
    assert len(text.read_examples([str(file)], ("text", "label"), skip=True)) == 1
    assert "1 examples, 1 lines skipped" in capsys.readouterr().err


def test_files_that_are_no_lines_are_not_left_out(tmp_path: Path) -> None:
    data = write_lines(tmp_path / "a.jsonl", [{"text": "abcdefghij"}] * 4)
    (tmp_path / "b.txt").write_text("words")
    (tmp_path / "c.bin").write_text("")
    (tmp_path / "c.idx").write_text("")
    for file, reason in (("b.txt", "no JSON lines"), ("c", "no JSON lines"), (".", "a folder")):
        chosen = settings(data=(str(data), str(tmp_path / file)), output=tmp_path / "out")
        with pytest.raises((BadData, BadTraining), match=reason):
            make_rows(chosen, transformers.GPT2Config(n_positions=8))


def test_a_label_that_the_model_does_not_know() -> None:
    with pytest.raises(BadData, match="its label 7 is none of the 2 classes"):
        text.classified([{"text": "a", "label": 7}], TOKENIZER, 8, {"0": 0, "1": 1})


def test_pictures_have_the_size_and_channels_of_the_model(tmp_path: Path) -> None:
    array = np.arange(2 * 4 * 6, dtype=np.uint8).reshape(2, 4, 6)
    np.savez(tmp_path / "a.npz", images=array, labels=np.array([5, 3]))
    pictures, labels = images.read_pictures([str(tmp_path / "a.npz")])
    rows = images.Pictures(pictures, labels, {"3": 0, "5": 1}, (3, 8, 8))
    assert rows[0]["pixel_values"].shape == (3, 8, 8)
    assert [int(rows[i]["labels"]) for i in range(2)] == [1, 0]
    same = images.Pictures(pictures, labels, {"3": 0, "5": 1}, (1, 4, 6))
    assert torch.equal(same[1]["pixel_values"][0], torch.tensor(array[1]).float() / 127.5 - 1)


def test_arrays_of_another_form(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", images=np.zeros((2, 3)), labels=np.zeros(2))
    with pytest.raises(BadData, match="must be uint8"):
        images.read_pictures([str(tmp_path / "a.npz")])
    np.savez(tmp_path / "b.npz", pictures=np.zeros(2))
    with pytest.raises(BadData, match="no arrays `images` and `labels`"):
        images.read_pictures([str(tmp_path / "b.npz")])
    with pytest.raises(BadData, match="no folder of classes"):
        images.read_pictures([str(tmp_path / "c")])


@pytest.mark.parametrize(
    ("changes", "text_of_error"),
    [
        ({"tokenizer": None}, "there is no tokenizer"),
        ({"tokenizer": "missing.json"}, "there is no tokenizer `missing.json`"),
    ],
)
def test_no_tokenizer(changes: dict[str, Any], text_of_error: str) -> None:
    with pytest.raises(BadTraining) as caught:
        text.load_tokenizer(settings(**changes))
    assert text_of_error in str(caught.value)
    assert "--tokenizer bytes" in str(caught.value)


@pytest.mark.parametrize("content", ["{", "{}", ""])
@pytest.mark.parametrize("folder", [True, False])
def test_a_file_that_is_no_tokenizer(content: str, folder: bool, tmp_path: Path) -> None:
    file = tmp_path / "tokenizer.json"
    file.write_text(content)
    (tmp_path / "tokenizer_config.json").write_text("{}")
    with pytest.raises(BadTraining, match="is no tokenizer of the `tokenizers` library"):
        text.load_tokenizer(settings(tokenizer=str(tmp_path if folder else file)))


def test_an_embedding_larger_than_the_tokenizer_that_is_asked_for(tmp_path: Path) -> None:
    data = write_lines(tmp_path / "text.jsonl", [{"text": "abcdefghij"}] * 4)
    for size in (320, 100):
        given = settings(
            data=(str(data),), output=tmp_path, model_settings=(("vocab_size", str(size)),)
        )
        config = transformers.GPT2Config(n_positions=8, vocab_size=size)
        if size > len(TOKENIZER):
            make_rows(given, config)
            assert config.vocab_size == size
            continue
        with pytest.raises(BadTraining, match="the model's embedding 100 rows") as caught:
            make_rows(given, config)
        assert f"--set vocab_size={len(TOKENIZER)}" in str(caught.value)


@pytest.mark.parametrize("split", ["1", "a,b", "0,1", "1,2,3", "nan,1", "1,nan", "inf,1"])
def test_a_split_of_another_form(split: str, tmp_path: Path) -> None:
    data = write_lines(tmp_path / "text.jsonl", [{"text": "abcdefghij"}] * 4)
    chosen = settings(data=(str(data),), output=tmp_path, split=split)
    with pytest.raises(BadTraining, match="no two shares"):
        make_rows(chosen, transformers.GPT2Config(n_positions=8))


def test_an_output_folder_is_made(tmp_path: Path) -> None:
    data = write_lines(tmp_path / "text.jsonl", [{"text": "abcdefghij"}] * 4)
    deep = tmp_path / "a" / "b"
    make_rows(settings(data=(str(data),), output=deep), transformers.GPT2Config(n_positions=8))
    assert (deep / "train.idx").is_file()


def test_pairs_of_sentences_have_masks_but_not_in_what_separates_them(tmp_path: Path) -> None:
    texts = [f"First {n} words here. Then {n} more follow. And an end." for n in range(30)]
    file = write_lines(tmp_path / "text.jsonl", [{"text": text} for text in texts])
    given = settings(
        task="masked-lm", model="bert", data=(str(file),), output=tmp_path / "out",
        next_sentence=True, length=64, split="80,20", mask_probability=0.5,
    )  # fmt: skip
    rows = make_rows(given, transformers.BertConfig(max_position_embeddings=64))
    assert len(rows.train) == pytest.approx(4 * len(rows.validation), abs=3)
    labels = []
    for number in range(len(rows.train)):
        row = rows.train[number]
        special = text.special_tokens(TOKENIZER).all
        predicted = row["labels"] != text.IGNORED
        original = row["input_ids"].where(~predicted, row["labels"])
        assert not torch.isin(row["labels"], torch.tensor(special)).any()
        assert original[0] == special[0]
        assert 0.2 < predicted.sum() / row["attention_mask"].sum() < 0.8
        assert set(row) == {
            "input_ids", "token_type_ids", "attention_mask", "labels", "next_sentence_label"
        }  # fmt: skip
        labels.append(int(row["next_sentence_label"]))
    assert set(labels) == {0, 1}
    with pytest.raises(BadTraining, match="takes no next_sentence_label"):
        make_rows(given, transformers.RobertaConfig(max_position_embeddings=64))
