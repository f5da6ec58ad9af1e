"""examples/gpt2/data.py: corpus, tokenizer, cache, batches."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

TEXT = "".join(f"def function_{i}(x):\n    return x + {i}\n\n" for i in range(400))


@pytest.fixture
def data(gpt2):
    return gpt2("data")


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    file = tmp_path / "corpus.txt"
    file.write_text(TEXT)
    return file


@given(text=st.text())
@settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_every_text_survives_the_tokenizer(data, text: str) -> None:
    tokenizer = data.train_tokenizer((TEXT,), 300)
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_tokens_are_the_documents_with_an_end_after_each(data, tmp_path: Path) -> None:
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "b.txt").write_text("second")
    (folder / "a.txt").write_text("first")
    text = data.prepare(folder, 300, cache=tmp_path / "cache")
    ids = np.concatenate([text.tokens["train"], text.tokens["validation"]])
    decoded = text.tokenizer.decode(ids.tolist(), skip_special_tokens=False)
    assert decoded == f"first{data.END}second{data.END}"


def test_the_vocabulary_has_the_size_asked_for(data, corpus: Path, tmp_path: Path) -> None:
    text = data.prepare(corpus, 290, cache=tmp_path / "cache")
    assert text.vocabulary == 290
    assert max(tokens.max() for tokens in text.tokens.values()) < 290


def test_validation_is_a_tenth(data, corpus: Path, tmp_path: Path) -> None:
    tokens = data.prepare(corpus, 290, cache=tmp_path / "cache").tokens
    share = len(tokens["validation"]) / (len(tokens["train"]) + len(tokens["validation"]))
    assert share == pytest.approx(0.1, abs=1e-3)


def test_the_second_time_nothing_is_trained(
    data, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = data.prepare(corpus, 290, cache=tmp_path / "cache")

    def train_tokenizer(*_: object) -> None:
        raise AssertionError("trained again")

    monkeypatch.setattr(data, "train_tokenizer", train_tokenizer)
    second = data.prepare(corpus, 290, cache=tmp_path / "cache")
    assert second.tokenizer.to_str() == first.tokenizer.to_str()
    assert np.array_equal(second.tokens["train"], first.tokens["train"])
    with pytest.raises(AssertionError, match="trained again"):
        data.prepare(corpus, 291, cache=tmp_path / "cache")
    corpus.write_text(TEXT + "more")
    with pytest.raises(AssertionError, match="trained again"):
        data.prepare(corpus, 290, cache=tmp_path / "cache")


def test_a_failed_build_leaves_nothing(
    data, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def train_tokenizer(*_: object) -> None:
        raise RuntimeError("interrupted")

    monkeypatch.setattr(data, "train_tokenizer", train_tokenizer)
    with pytest.raises(RuntimeError, match="interrupted"):
        data.prepare(corpus, 290, cache=tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_many_may_build_the_cache_at_once(data, corpus: Path, tmp_path: Path) -> None:
    with ThreadPoolExecutor(4) as pool:
        texts = list(
            pool.map(lambda _: data.prepare(corpus, 290, cache=tmp_path / "cache"), range(4))
        )
    assert [folder.name for folder in (tmp_path / "cache").iterdir()] == [
        data.read_corpus(corpus, 8_000_000).digest(290)
    ]
    for text in texts[1:]:
        assert np.array_equal(text.tokens["train"], texts[0].tokens["train"])


def test_batches_are_rows_of_the_text_and_the_same_shifted_by_one(
    data, corpus: Path, tmp_path: Path
) -> None:
    text = data.prepare(corpus, 290, cache=tmp_path / "cache")
    x, y = text.get_batch("train", batch=5, sequence=7, step=3, seed=1)
    assert (x.shape, y.shape, str(x.dtype)) == ((5, 7), (5, 7), "torch.int64")
    windows = np.lib.stride_tricks.sliding_window_view(text.tokens["train"], 8)
    for inputs, targets in zip(x.numpy(), y.numpy(), strict=True):
        assert (windows == np.append(inputs, targets[-1])).all(axis=1).any()
        assert (inputs[1:] == targets[:-1]).all()


def test_a_batch_is_a_function_of_seed_split_and_step(data, corpus: Path, tmp_path: Path) -> None:
    text = data.prepare(corpus, 290, cache=tmp_path / "cache")
    x, _ = text.get_batch("train", 8, 16, step=3, seed=1)
    assert x.equal(text.get_batch("train", 8, 16, step=3, seed=1)[0])
    assert not x.equal(text.get_batch("train", 8, 16, step=4, seed=1)[0])
    assert not x.equal(text.get_batch("train", 8, 16, step=3, seed=2)[0])
    assert not x.equal(text.get_batch("validation", 8, 16, step=3, seed=1)[0])


def test_the_longest_sequence_is_one_less_than_the_tokens(
    data, corpus: Path, tmp_path: Path
) -> None:
    text = data.prepare(corpus, 290, cache=tmp_path / "cache")
    tokens = text.tokens["validation"]
    x, y = text.get_batch("validation", 1, len(tokens) - 1, step=0)
    assert (x[0].numpy() == tokens[:-1]).all()
    assert (y[0].numpy() == tokens[1:]).all()
    message = f"validation has {len(tokens)} tokens, fewer than a sequence of {len(tokens)} and its"
    with pytest.raises(ValueError, match=message):
        text.get_batch("validation", 1, len(tokens), step=0)


def test_a_folder_is_read_in_order_without_tests_hidden_and_binary_files(
    data, tmp_path: Path
) -> None:
    for name in ("b.txt", "a/z.txt", "a/tests/no.txt", ".git/no.txt", "a/.no.txt", "empty.txt"):
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("" if "empty" in name else name)
    (tmp_path / "c.bin").write_bytes(b"\0\1\2")
    text = data.read_corpus(tmp_path, 1000)
    assert text.documents == ("a/z.txt", "b.txt")
    assert (text.binary, text.beyond_cap) == (1, 0)


def test_the_cap_stops_before_the_file_that_would_pass_it(data, tmp_path: Path) -> None:
    for name in "abcd":
        (tmp_path / name).write_text(name * 10)
    text = data.read_corpus(tmp_path, 29)
    assert text.documents == ("a" * 10, "b" * 10)
    assert text.beyond_cap == 2
    assert data.read_corpus(tmp_path / "a", 4).documents == ("aaaa",)


def test_the_default_corpus_is_the_standard_library(data) -> None:
    text = data.read_corpus(None, 1_000_000)
    assert text.origin == "Python's standard library"
    assert 500_000 < sum(len(document.encode()) for document in text.documents) <= 1_000_000
    assert any("class ABCMeta" in document for document in text.documents)
    assert text == data.read_corpus(None, 1_000_000)


def test_no_text_is_an_error(data, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no such corpus: .*missing"):
        data.read_corpus(tmp_path / "missing", 1000)
    with pytest.raises(ValueError, match=r"no text in .* \(cap 1000 bytes\)"):
        data.read_corpus(tmp_path, 1000)


@pytest.mark.parametrize("vocabulary", [256, 65537])
def test_a_vocabulary_that_does_not_fit_is_refused(data, vocabulary: int) -> None:
    with pytest.raises(ValueError, match=f"vocabulary must be 257 to 65536.*not {vocabulary}"):
        data.prepare(None, vocabulary)
