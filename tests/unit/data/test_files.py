"""Row files: random access, iteration, and what is said of bad ones."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megarl.data import files
from megarl.data.files import RowFiles
from megarl.errors import DataError

ROWS = [{"a": i, "b": f"text {i}"} for i in range(10)]


def write_jsonl(path: Path, rows: list[dict[str, object]]) -> Path:
    path.write_text("\n".join(json.dumps(row) for row in rows), encoding="utf-8")
    return path


def write_parquet(path: Path, rows: list[dict[str, object]]) -> Path:
    pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=3)
    return path


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_rows_by_index_and_in_order(tmp_path: Path, suffix: str) -> None:
    write = write_jsonl if suffix == ".jsonl" else write_parquet
    first = write(tmp_path / f"first{suffix}", ROWS[:7])
    second = write(tmp_path / f"second{suffix}", ROWS[7:])
    files = RowFiles([first, second], columns=("a", "b"), required=("a",))
    assert len(files) == 10
    assert [files[i] for i in (9, 0, 6, 7)] == [ROWS[9], ROWS[0], ROWS[6], ROWS[7]]
    assert list(files) == ROWS
    assert files.where(6) == f"{first} row 6"
    assert files.where(7) == f"{second} row 0"
    for index in (-1, 10):
        with pytest.raises(IndexError):
            files[index]


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_reads_only_the_wanted_columns(tmp_path: Path, suffix: str) -> None:
    write = write_jsonl if suffix == ".jsonl" else write_parquet
    files = RowFiles([write(tmp_path / f"x{suffix}", ROWS)], columns=("b", "absent"))
    assert files[3] == {"b": "text 3"}


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_missing_column_is_named_with_those_there_are(tmp_path: Path, suffix: str) -> None:
    write = write_jsonl if suffix == ".jsonl" else write_parquet
    path = write(tmp_path / f"x{suffix}", ROWS)
    with pytest.raises(DataError, match=r"x\.\w+: column 'prompt' is missing; there are: a, b"):
        RowFiles([path], columns=("prompt",), required=("prompt",))


def test_jsonl_skips_empty_lines_and_keeps_unicode(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes('{"a": "é"}\n\n   \n{"a": "漢"}\r\n'.encode())
    files = RowFiles([path], columns=("a",))
    assert list(files) == [{"a": "é"}, {"a": "漢"}]


@pytest.mark.parametrize(("line", "what"), [("{oops", "not valid JSON"), ("[1]", "got list, .*; write one in each")])
def test_bad_json_names_file_and_row(tmp_path: Path, line: str, what: str) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text(f'{{"a": 1}}\n{line}\n')
    files = RowFiles([path], columns=("a",))
    with pytest.raises(DataError, match=rf"x\.jsonl row 1: {what}"):
        files[1]


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such file"):
        RowFiles([tmp_path / "x.jsonl"], columns=("a",))
    with pytest.raises(DataError, match=r"got file type '\.csv', expected one of: \.jsonl, \.parquet"):
        RowFiles([tmp_path / "x.csv"], columns=("a",))
    (tmp_path / "x.parquet").write_text("not parquet at all")
    with pytest.raises(DataError, match=r"x\.parquet: is text, expected a Parquet file; convert it"):
        RowFiles([tmp_path / "x.parquet"], columns=("a",))


# What JavaScript writes of a text that was cut within 😀, at the positions of its two halves.
# What JavaScript writes of a text that was cut within 😀, at the positions of its two halves.
@pytest.mark.parametrize(
    ("line", "found"),
    [
        (rb'{"a": "I am happy \ud83d"}', r"a has '\\ud83d' at position 11,"),
        (rb'{"a": "\uDE00 first"}', r"a has '\\ude00' at position 0,"),
        (rb'{"a": "\ude00\ud83d"}', r"a has '\\ude00' at position 0,"),  # the halves in the wrong order
        (rb'{"a": "\ud83d\ude00\ude00"}', r"a has '\\ude00' at position 1,"),
        (b'{"a": "raw \xed\xa0\xbd"}', r"a has '\\ud83d' at position 4,"),  # as CESU-8 encodes a half
        (rb'{"a": {"b": [1, {"c": "x\ud83d"}]}}', r"a\.b\[1\]\.c has '\\ud83d' at position 1,"),
        (rb'{"a": {"k\ud83d": 1}}', r"a key of a has '\\ud83d' at position 1,"),
    ],
)
def test_half_of_a_character_is_refused_with_its_row_and_place(tmp_path: Path, line: bytes, found: str) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(b'{"a": "1", "b": "unread"}\n' + line + b"\n")
    files = RowFiles([path], columns=("a",))
    for read in (lambda: list(files), lambda: files[1]):
        with pytest.raises(DataError, match=rf"^\S+x\.jsonl row 1: {found} .*complete or remove it$"):
            read()


def test_whole_characters_however_written_are_no_halves(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    # An emoji, the same with capitals, the escape's own letters after a backslash, Korean, and a zero byte.
    path.write_bytes(rb'{"a": "\ud83d\ude00 \uD83D\uDE00 \\ud83d \ud55c \u0000"}' + b"\n" + '{"a": "한😀"}\n'.encode())
    assert [row["a"] for row in RowFiles([path], columns=("a",))] == ["😀 😀 \\ud83d 한 \0", "한😀"]


@pytest.mark.parametrize("name", ["shards", "shards.parquet", "shards.jsonl"])
def test_a_directory_is_no_file(name: str, tmp_path: Path) -> None:
    (tmp_path / name).mkdir()
    with pytest.raises(DataError, match=rf"^{tmp_path / name}: is a directory, .*; name the files themselves$"):
        RowFiles([tmp_path / name], columns=("prompt",))


@pytest.mark.parametrize(
    ("kind", "stored_as"), [(pa.float16(), np.float16), (pa.float32(), np.float32), (pa.float64(), np.float64)]
)
def test_numbers_are_read_as_the_decimals_that_were_written(kind: pa.DataType, stored_as: Any, tmp_path: Path) -> None:
    """At any depth, whatever the width in which a file stores them."""
    values = [0.1, 2.75, None, 2.0**-12]
    stored = [None if value is None else stored_as(value) for value in values]
    nested = pa.struct([("ground_truth", pa.list_(kind)), ("other", pa.string())])
    rows = {
        "label": pa.array(stored, kind),
        "reward_model": pa.array([{"ground_truth": [value], "other": "0.10000000149"} for value in stored], nested),
        "map": pa.array([[("a", value)] for value in stored], pa.map_(pa.string(), kind)),
    }
    pq.write_table(pa.table(rows), tmp_path / "a.parquet")
    read = [dict(row) for row in RowFiles([tmp_path / "a.parquet"], columns=list(rows))]
    assert [row["label"] for row in read] == [0.1, 2.75, None, pytest.approx(2.0**-12, rel=1e-3)]
    assert [row["reward_model"]["ground_truth"] for row in read] == [[row["label"]] for row in read]
    assert [row["map"] for row in read] == [{"a": row["label"]} for row in read]
    # What they stand for is the same to the bit.
    assert stored_as(read[3]["label"]) == 2.0**-12


def test_the_collector_leaves_out_what_there_was_while_rows_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also while two readers take turns, and where the reading is broken off."""
    frozen = list[int]()
    collector = SimpleNamespace(
        freeze=lambda: frozen.append(1), unfreeze=frozen.clear, get_freeze_count=lambda: len(frozen)
    )
    monkeypatch.setattr(files, "_FEW_ROWS", 2)
    monkeypatch.setattr(files, "gc", collector)
    path = tmp_path / "a.jsonl"
    path.write_text('{"a": 1}\n{"a": 2}\n')
    data = RowFiles([path], columns=["a"])
    first, second = iter(data), iter(data)
    assert [next(first), next(second)] == [{"a": 1}, {"a": 1}]
    assert frozen
    assert [row["a"] for row in second] == [2]
    assert frozen
    del first
    assert not frozen
    # A run that has frozen its objects keeps them so.
    collector.freeze()
    assert len(list(data)) == 2
    assert frozen


def test_empty_data_set(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text("\n")
    (tmp_path / "y.jsonl").write_text("")
    write_parquet(tmp_path / "z.parquet", ROWS)
    pq.write_table(pq.read_table(tmp_path / "z.parquet").slice(0, 0), tmp_path / "z.parquet")
    for names in (["x.jsonl", "y.jsonl"], ["z.parquet"], []):
        with pytest.raises(DataError, match="data set is empty"):
            RowFiles([tmp_path / name for name in names], columns=("a",))


def test_parquet_text_that_is_not_utf8_is_named(tmp_path: Path) -> None:
    # Arrow takes the bytes as they are.
    latin1 = pa.array([b"caf\xc3\xa9", b"caf\xe9"], pa.binary()).view(pa.string())
    pq.write_table(pa.table({"a": [1, 2], "b": latin1}), tmp_path / "x.parquet")
    with pytest.raises(DataError, match=r"x\.parquet row 1: b has a text that is not UTF-8 \(.* at byte 3\)"):
        list(RowFiles([tmp_path / "x.parquet"], columns=("a", "b")))


def test_parquet_maps_are_mappings(tmp_path: Path) -> None:
    kind = pa.map_(pa.string(), pa.string())
    pq.write_table(pa.table({"a": pa.array([[("x", "1")], [("x", "1"), ("x", "2")]], kind)}), tmp_path / "x.parquet")
    files = RowFiles([tmp_path / "x.parquet"], columns=("a",))
    assert files[0] == {"a": {"x": "1"}}
    with pytest.raises(DataError, match=r"x\.parquet row 1: a has a map with one key twice;"):
        files[1]
