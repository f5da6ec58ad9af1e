"""Token files: the published layout byte by byte, what was written is read, damage is named."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphaccel.data.token_file import TokenFile, TokenWriter, dtype_for
from graphaccel.errors import BadData


def by_hand(prefix: Path, rows: list[list[int]], documents: list[int]) -> None:
    """A pair of files as the layout of Megatron-LM's `indexed_dataset.py` has them."""
    data = b"".join(struct.pack(f"<{len(row)}H", *row) for row in rows)
    prefix.with_suffix(".bin").write_bytes(data)
    starts = [2 * sum(map(len, rows[:i])) for i in range(len(rows))]
    prefix.with_suffix(".idx").write_bytes(
        b"MMIDIDX\x00\x00"
        + struct.pack("<QBQQ", 1, 8, len(rows), len(documents))
        + struct.pack(f"<{len(rows)}i", *map(len, rows))
        + struct.pack(f"<{len(rows)}q", *starts)
        + struct.pack(f"<{len(documents)}q", *documents)
    )


ROWS = [[5, 6, 7], [8], [9, 10], [11, 12, 13, 14]]


def test_a_file_of_the_published_layout_is_read(tmp_path: Path) -> None:
    by_hand(tmp_path / "corpus", ROWS, [0, 2, 3, 4])
    tokens = TokenFile(tmp_path / "corpus")
    assert [row.tolist() for row in tokens] == ROWS
    assert tokens.documents.tolist() == [0, 2, 3, 4]
    assert tokens.dtype == np.uint16


def test_what_is_written_is_that_file(tmp_path: Path) -> None:
    by_hand(tmp_path / "expected", ROWS, [0, 2, 3, 4])
    with TokenWriter(tmp_path / "found", np.uint16) as writer:
        writer.add(ROWS[0], ROWS[1])
        writer.add(ROWS[2])
        writer.add_many(np.array(ROWS[3]), [4])
    for end in (".bin", ".idx"):
        expected = (tmp_path / "expected").with_suffix(end).read_bytes()
        assert (tmp_path / "found").with_suffix(end).read_bytes() == expected
    assert len(list(tmp_path.iterdir())) == 4


@given(st.lists(st.lists(st.integers(0, 60_000), max_size=5), max_size=8), st.booleans())
def test_what_was_written_is_read(
    tmp_path_factory: pytest.TempPathFactory, rows: list[list[int]], wide: bool
) -> None:
    prefix = tmp_path_factory.mktemp("tokens") / "corpus.v1"
    with TokenWriter(prefix, dtype_for(100_000 if wide else 60_001)) as writer:
        for row in rows:
            writer.add(row)
    tokens = TokenFile(prefix)
    assert tokens.dtype == (np.int32 if wide else np.uint16)
    assert [row.tolist() for row in tokens] == rows
    assert tokens.documents.tolist() == [*range(len(rows) + 1)]


def test_a_writer_that_fails_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(BadData) as caught, TokenWriter(tmp_path / "corpus", np.uint16) as writer:
        writer.add([1, 70_000])
    assert caught.value.reason == "token 70000 does not fit in uint16"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("file", "damage", "reason"),
    [
        (".bin", lambda b: b[:-2], "it has 18 bytes, and the index beside it needs 20"),
        (".idx", lambda b: b[:-1], "it has 113 bytes, and 4 sequences take 114"),
        (".idx", lambda b: b[:20], "it does not begin as an index of Megatron-LM does"),
        (".idx", lambda b: b"x" + b[1:], "it does not begin as an index of Megatron-LM does"),
        (".idx", lambda b: b[:17] + b"\x63" + b[18:], "version 1 with dtype code 99 is not known"),
        (".idx", lambda b: b[:17] + b"\x07" + b[18:], "its tokens are float32, no whole numbers"),
        (".idx", lambda b: b[:-1] + b"\x01", "its documents do not end with its last sequence"),
    ],
)
def test_damage_is_named(tmp_path: Path, file: str, damage, reason: str) -> None:
    by_hand(tmp_path / "corpus", ROWS, [0, 2, 3, 4])
    path = (tmp_path / "corpus").with_suffix(file)
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(BadData) as caught:
        TokenFile(tmp_path / "corpus")
    assert (caught.value.place, caught.value.reason) == (str(path), reason)


@pytest.mark.parametrize(("code", "dtype"), [(1, "uint8"), (4, "int32")])
def test_a_dtype_of_another_width_is_named(tmp_path: Path, code: int, dtype: str) -> None:
    """Ten tokens of uint16: halves of them, or two in one, would be read."""
    prefix = tmp_path / "corpus"
    by_hand(prefix, ROWS, [0, 2, 3, 4])
    data = bytearray(prefix.with_suffix(".idx").read_bytes())
    data[17] = code
    prefix.with_suffix(".idx").write_bytes(data)
    with pytest.raises(BadData) as caught:
        TokenFile(prefix)
    assert caught.value.place == str(prefix.with_suffix(".bin"))
    assert caught.value.reason == (
        f"its 10 tokens have 2 bytes each, and the index beside it says {dtype}"
    )


@given(st.integers(0, 113), st.integers(0, 255))
def test_no_damage_is_a_traceback(
    tmp_path_factory: pytest.TempPathFactory, place: int, byte: int
) -> None:
    prefix = tmp_path_factory.mktemp("fuzz") / "corpus"
    by_hand(prefix, ROWS, [0, 2, 3, 4])
    index = prefix.with_suffix(".idx")
    data = bytearray(index.read_bytes())
    data[place] = byte
    index.write_bytes(data)
    try:
        rows = list(TokenFile(prefix))
    except BadData:
        return
    assert len(rows) <= 4


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(BadData) as caught:
        TokenFile(tmp_path / "none")
    assert str(caught.value) == (
        f"error[GA417]: `{tmp_path}/none.bin` can not be used as training data\n"
        "  why:  there is no such file\n"
        "  help: write it:  graphaccel tokenize text.jsonl --tokenizer tokenizer.json --output "
        f"{tmp_path}/none\n"
        "  explain: graphaccel explain GA417"
    )


def test_documents_that_leave_out_the_first_sequences(tmp_path: Path) -> None:
    by_hand(tmp_path / "corpus", ROWS, [1, 2, 3, 4])
    with pytest.raises(BadData, match="do not begin with its first sequence"):
        TokenFile(tmp_path / "corpus")


@pytest.mark.parametrize(
    ("lengths", "sequences", "said"),
    [
        ([3, 1], None, "lengths sum to 4, and 5 tokens are added"),
        ([3, 2], [1], "sequences sum to 1, and 2 sequences are added"),
        ([6, -1], None, "lengths sum to 5"),
    ],
)
def test_parts_that_are_not_the_whole(
    lengths: list[int], sequences: list[int] | None, said: str, tmp_path: Path
) -> None:
    with TokenWriter(tmp_path / "corpus") as writer:
        with pytest.raises(BadData, match=said):
            writer.add_many(np.arange(5), lengths, sequences)
        writer.add([1, 2])
    assert [row.tolist() for row in TokenFile(tmp_path / "corpus")] == [[1, 2]]


def test_tokens_that_are_no_whole_numbers(tmp_path: Path) -> None:
    with TokenWriter(tmp_path / "corpus") as writer:
        for tokens in ([1.5, 2.0], np.ones(3), ["a"]):
            with pytest.raises(BadData, match="are no whole numbers"):
                writer.add(tokens)
        writer.add([])


def test_a_place_that_can_not_be_written(tmp_path: Path) -> None:
    with pytest.raises(BadData) as caught:
        TokenWriter(tmp_path / "none" / "corpus")
    assert f"help: mkdir -p {tmp_path / 'none'}" in str(caught.value)
    (tmp_path / "file").write_text("")
    with pytest.raises(BadData, match="it can not be written: Not a directory"):
        TokenWriter(tmp_path / "file" / "corpus")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a disk that is full")
def test_a_full_disk_leaves_no_file(tmp_path: Path) -> None:
    writer = TokenWriter(tmp_path / "corpus")
    writer._file.close()
    writer._file = open("/dev/full", "wb")
    with pytest.raises(BadData, match="it can not be written: No space left"), writer:
        writer.add(np.arange(100_000) % 7)
    assert not list(tmp_path.iterdir())
