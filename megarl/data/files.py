"""Access rows of Parquet and JSON-lines files by index, without keeping a Python object per row.

The wanted columns of a Parquet file stay in Arrow memory. A JSON-lines file is memory-mapped, and only the offset of
every line is kept. A row becomes a dictionary when it is read. Arrow's reader of JSON lines takes a field in one type
only, and `datasets` writes a copy of every file.
"""

import gc
import json
import mmap
import re
from array import array
from bisect import bisect_right
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import accumulate, chain, product
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from megarl.data.written import read_structure
from megarl.errors import DataError
from megarl.host.reading import damage, reading, reason_of, require_file
from megarl.host.unicode import find_surrogate

# Parts of the names of columns with tools, and with what is no text.
_TOOLS = product(("tool", "function"), ("s", "_list", "_schema", "_schemas", "_definitions", "s_schema", "s_json"))
_MEDIA = product(
    ("image", "images", "video", "videos", "audio", "audios"),
    ("", "_path", "_paths", "_url", "_urls", "_file", "_files", "_bytes", "_base64"),
)
# Columns that change what the model is to read, or how, and what to do with them.
UNREAD_COLUMNS = {
    **dict.fromkeys(
        ("available_tools", "available_functions", *map("".join, _TOOLS)), "write the tools into a system turn instead"
    ),
    **dict.fromkeys(
        ("multi_modal_data", *map("".join, _MEDIA)), "models are trained on texts alone; leave the row out"
    ),
    **dict.fromkeys(("chat_template_kwargs", "enable_thinking"), "set data.chat_template, for all rows, instead"),
    **dict.fromkeys(("documents", "history"), "write it into the prompt instead"),
    "system_prompt": "rename the column to system",
    "agent_name": "set environment.default to one that has its tools, and remove the column",
}
# Values of such columns, or keys of turns, that say no more than their absence.
PLAIN = {"agent_name": "single_turn_agent", "channel": "final", "recipient": "all"}
# For a column, those that complete its prompts, in the formats of Alpaca, Dolly, SQuAD and MMLU.
_COMPLETING = {"instruction": ("input", "context"), "question": ("context", "choices", "options")}
READ_ROWS = 1024  # rows that iteration turns into dictionaries at a time
# With fewer rows, garbage collection takes less time than `gc.get_freeze_count`.
_FEW_ROWS = 20_000
_SEARCHED_ROWS = 64  # rows of a column of `unread` that are searched at a time, as they may hold videos
REPAIR = "correct or remove the row"

# How JSON may write a lone surrogate: an escape without its other half, or the bytes that would encode it.
# An escape after an escaped backslash is ordinary text, as the row itself then shows.
_ESCAPED_HALF = re.compile(rb"\\u[dD](?:[89abAB]..(?!\\u[dD][c-fC-F])|[c-fC-F](?<!\\u[dD][89abAB]..\\u[dD].))")
_ENCODED_HALF = re.compile(rb"\xed[\xa0-\xbf]")


def _require_empty(value: object, name: str, where: str) -> None:
    """Raise DataError, which names the row (`where`), for a value of a column that changes what models read."""
    if read_structure(value, f"{where}: {name}") not in (None, "", [], {}, PLAIN.get(name)):
        remedy = UNREAD_COLUMNS.get(name, "write it into the prompt, or remove the column")
        raise DataError(f"{where}: {name} is not read here; {remedy}")


class ParquetFile:
    """A Parquet file of which only some columns are read; `present` names all columns that the file has.

    Raises DataError for a row with a value in a column of `unread`.
    """

    def __init__(self, path: Path, columns: Sequence[str], unread: Sequence[str] = ()) -> None:
        self._path = path
        with reading(path, "a Parquet file"), pq.ParquetFile(path, page_checksum_verification=True) as file:
            self.present: Sequence[str] = file.schema_arrow.names
            for name in unread:
                if name in self.present:
                    self._require_empty_column(name)
            table = file.read(columns=[name for name in dict.fromkeys(columns) if name in self.present])
            # Find damage that no checksum shows, such as text that is not UTF-8, before a row is read.
            try:
                table.validate(full=True)
            except pa.ArrowInvalid as error:
                if "UTF8" in str(error):
                    self._locate_damaged_text(table)
                raise
        # Rows without maps are read in half the time without this.
        self._maps = "strict" if "map<" in str(table.schema) else None
        self._narrow = {each.name: each.type for each in table.schema if _is_narrow(each.type)}
        self._batches = [batch for batch in table.to_batches() if batch.num_rows]
        self._ends = np.cumsum([batch.num_rows for batch in self._batches], dtype=np.int64)

    def __len__(self) -> int:
        return int(self._ends[-1]) if self._batches else 0

    def __getitem__(self, index: int) -> Mapping[str, object]:
        which = int(np.searchsorted(self._ends, index, side="right"))
        batch = self._batches[which]
        start = index - (int(self._ends[which]) - batch.num_rows)
        row: Mapping[str, object] = self._rows(batch.slice(start, 1), index)[0]
        return row

    def __iter__(self) -> Iterator[Mapping[str, object]]:
        first = 0
        for batch in self._batches:
            for start in range(0, batch.num_rows, READ_ROWS):
                rows = self._rows(batch.slice(start, READ_ROWS), first)
                first += len(rows)
                yield from rows

    def _require_empty_column(self, name: str) -> None:
        """Raise DataError, which names the row, for the first value in a column; read as little of it as that takes."""
        start = 0
        with pq.ParquetFile(self._path, page_checksum_verification=True, memory_map=True) as file:
            groups = [file.metadata.row_group(i) for i in range(file.num_row_groups)]
            sizes = Counter[str]()
            for group, i in product(groups, range(file.metadata.num_columns)):
                part = group.column(i)
                if part.path_in_schema.split(".")[0] == name:
                    sizes[part.path_in_schema] += part.total_uncompressed_size
            # Any part of a struct shows whether a row has one, so read the smallest; but Arrow reads maps as a whole.
            is_map = pa.types.is_map(file.schema_arrow.field(name).type)
            parts = [name] if is_map or not sizes else [min(sizes, key=lambda part: sizes[part])]
            for batch in file.iter_batches(_SEARCHED_ROWS, columns=parts):
                column = batch.column(0)
                for i, value in enumerate(column if column.null_count < len(column) else ()):
                    _require_empty(value.as_py(), name, f"{self._path} row {start + i}")
                start += len(column)

    def _locate_damaged_text(self, table: pa.Table) -> None:
        """Raise DataError that names the row and the column of a text that is not UTF-8, if there is one."""
        for name in table.column_names:
            for row, value in enumerate(table.column(name)):
                try:
                    value.as_py()
                except UnicodeDecodeError as error:
                    what = f"{name} has a text that is not UTF-8 ({error.reason} at byte {error.start})"
                    raise DataError(f"{self._path} row {row}: {what}; {REPAIR}") from error

    def _rows(self, batch: pa.RecordBatch, first: int) -> Sequence[Mapping[str, object]]:
        """Return a batch's rows, with maps as dictionaries. first: the number of its first row, for messages."""
        try:
            rows: list[dict[str, object]] = batch.to_pylist(maps_as_pydicts=self._maps)
        # Python has no value for a map with one key twice, a time in nanoseconds, a year after 9999 or such.
        except (KeyError, ValueError, OverflowError) as error:
            for i, name in product(range(batch.num_rows), batch.schema.names):
                try:
                    batch.column(name)[i].as_py(maps_as_pydicts=self._maps)
                except (KeyError, ValueError, OverflowError) as failure:
                    twice = isinstance(failure, KeyError)
                    what = "a map with one key twice" if twice else f"a value that cannot be read: {reason_of(failure)}"
                    raise DataError(f"{self._path} row {first + i}: {name} has {what}; {REPAIR}") from error
            raise
        for name, kind in self._narrow.items():
            for row in rows:
                row[name] = _shortest(row[name], kind)
        return rows


def _is_narrow(kind: pa.DataType) -> bool:
    """Return whether a type contains float16 or float32, at any depth."""
    inner = [kind.field(i).type for i in range(kind.num_fields)]
    return pa.types.is_float16(kind) or pa.types.is_float32(kind) or any(map(_is_narrow, inner))


def _shortest(value: Any, kind: pa.DataType) -> object:
    """Return a value with each float16 or float32 as the shortest decimal that rounds to it: 0.1, and neither
    0.0999755859375 nor 0.10000000149011612.
    """
    if value is None or not _is_narrow(kind):
        return value
    if pa.types.is_float16(kind) or pa.types.is_float32(kind):
        return float(str((np.float16 if pa.types.is_float16(kind) else np.float32)(value)))
    if pa.types.is_struct(kind):
        return {name: _shortest(each, kind.field(name).type) for name, each in value.items()}
    if isinstance(value, Mapping):
        return {name: _shortest(each, kind.item_type) for name, each in value.items()}
    return [_shortest(each, kind.value_type) for each in value] if isinstance(value, list) else value


class JsonlFile:
    """The JSON objects in a file's lines, of which only some keys are read; `present` names all keys of the first row.

    Empty lines are not rows. Iteration raises DataError for a row with a value under a key of `unread`.
    """

    def __init__(self, path: Path, columns: Sequence[str], unread: Sequence[str] = ()) -> None:
        self._path, self._unread = path, frozenset(unread)
        offset, self._starts = 0, array("q")
        with reading(path, "JSON lines"), path.open("rb") as file:
            for line in file:
                if not line.isspace():
                    self._starts.append(offset)
                offset += len(line)
            # An empty file cannot be mapped.
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if self._starts else None
        self._columns: frozenset[str] | None = None  # all keys, for the first row
        self.present: Sequence[str] = list(self[0]) if self._starts else columns
        self._columns = frozenset(columns) | self._unread

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, index: int) -> Mapping[str, object]:
        if self._map is None:
            raise IndexError(index)
        start = self._starts[index]
        end = self._map.find(b"\n", start)
        line = self._map[start : end if end >= 0 else len(self._map)]
        try:
            row = json.loads(line)
        # Brackets within brackets, thousands of them, are too deep for the parser.
        except (ValueError, RecursionError) as error:
            raise DataError(
                damage(self._path, "valid JSON", error, remedy=REPAIR, where=f"{self._path} row {index}")
            ) from error
        if not isinstance(row, dict):
            raise DataError(
                f"{self._path} row {index}: got {type(row).__name__}, expected a JSON object; write one in each line, "
                "as pandas does with to_json(path, orient='records', lines=True)"
            )
        row = {key: value for key, value in row.items() if self._columns is None or key in self._columns}
        may_have_half = _ESCAPED_HALF.search(line) or _ENCODED_HALF.search(line)
        if may_have_half and (found := find_surrogate(row, "")):
            raise DataError(f"{self._path} row {index}: {found}; complete or remove it")
        return row

    def __iter__(self) -> Iterator[Mapping[str, object]]:
        for index in range(len(self)):
            row = self[index]
            if not self._unread.isdisjoint(row):
                for name in self._unread & row.keys():
                    _require_empty(row[name], name, f"{self._path} row {index}")
            yield row


READERS: Mapping[str, type[ParquetFile] | type[JsonlFile]] = {".parquet": ParquetFile, ".jsonl": JsonlFile}


def _open(path: Path, columns: Sequence[str], unread: Sequence[str] = ()) -> ParquetFile | JsonlFile:
    remedy = "name the files themselves" if path.is_dir() else "check data.train, data.val and sft.train"
    if path.suffix in (*READERS, "") or path.is_dir():
        require_file(path, "Parquet or JSON lines", remedy=remedy)
    if path.suffix not in READERS:
        raise DataError(
            f"{path}: got file type {path.suffix!r}, expected one of: {', '.join(sorted(READERS))}; convert it, as "
            "pandas does with to_parquet"
        )
    return READERS[path.suffix](path, columns, unread)


def columns_of(path: Path) -> Sequence[str]:
    """Return the names of a file's columns, or the keys of its first row; DataError if the file cannot be read."""
    return _open(path, ()).present


# For files whose columns no setting names.
COLUMN_REMEDY = "give one of them that name"


class RowFiles:
    """The rows of several files, presented as one sequence.

    Raises:
        DataError: a file is missing, is damaged or lacks a column of `required` (`remedy` says what to do); there are
            no rows at all; or a row has a value in a column that `columns` does not name, and that is one of `unread`
            or completes one of `columns` (in JSON lines, only iteration notices such values).
    """

    def __init__(
        self,
        paths: Sequence[str | Path],
        *,
        columns: Sequence[str],
        required: Sequence[str] = (),
        remedy: str = COLUMN_REMEDY,
        unread: Collection[str] = UNREAD_COLUMNS,
    ) -> None:
        self.paths = tuple(Path(path) for path in paths)
        self._files: list[ParquetFile | JsonlFile] = []
        changing = [*unread, *chain(*(_COMPLETING.get(name, ()) for name in columns if unread))]
        for path in self.paths:
            file = _open(path, columns, [name for name in changing if name not in columns])
            if missing := [name for name in required if name not in file.present]:
                there = ", ".join(sorted(file.present))
                raise DataError(f"{path}: column {missing[0]!r} is missing; there are: {there}; {remedy}")
            self._files.append(file)
        self._ends, self._names = [*accumulate(self.sizes)], [*map(str, self.paths)]
        if not len(self):
            names = ", ".join(self._names) or "no file given"
            raise DataError(f"the data set is empty ({names}); expected at least one row")

    def __len__(self) -> int:
        return self._ends[-1] if self._files else 0

    def __getitem__(self, index: int) -> Mapping[str, object]:
        which, row = self._locate(index)
        return self._files[which][row]

    def __iter__(self) -> Iterator[Mapping[str, object]]:
        """Yield all rows. If they are many, garbage collection meanwhile skips the objects that existed before."""
        freezes = len(self) >= _FEW_ROWS and gc.get_freeze_count() == 0
        if freezes:
            gc.freeze()
        try:
            yield from chain.from_iterable(self._files)
        finally:
            if freezes:
                gc.unfreeze()

    @property
    def sizes(self) -> list[int]:
        """Return the number of rows of each file."""
        return [len(file) for file in self._files]

    def counts(self, indices: Sequence[int]) -> list[int]:
        """Return how many of the given row indices, which must be in ascending order, lie in each file."""
        return np.diff(np.searchsorted(indices, self._ends), prepend=0).tolist()

    def where(self, index: int) -> str:
        """Return a name of row `index` for messages: its file and its position there, counted from 0."""
        which, row = self._locate(index)
        return f"{self._names[which]} row {row}"

    def file_of(self, index: int) -> Path:
        """Return the file that has row `index`."""
        return self.paths[self._locate(index)[0]]

    def _locate(self, index: int) -> tuple[int, int]:
        which = bisect_right(self._ends, index)
        if index < 0 or which == len(self._ends):
            raise IndexError(f"row {index} of {len(self)}")
        return which, index - (self._ends[which - 1] if which else 0)
