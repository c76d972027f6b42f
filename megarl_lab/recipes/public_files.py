"""Convert published prompt files: TinyZero's Countdown, and files of verl's schema that repeat their prompts."""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from megarl.data.files import RowFiles
from megarl.errors import DataError
from megarl.host.reading import reading
from megarl.host.writing import replacing

_TEXT = pa.string()
_MESSAGES = pa.list_(pa.struct({"role": _TEXT, "content": _TEXT}))
_EXTRA = {
    "index": pa.int64(),
    "split": _TEXT,
    "gold_solution": _TEXT,
    "difficulty_score": pa.float64(),
    "subject": _TEXT,
}
SCHEMA = pa.schema(
    {
        "prompt": _MESSAGES,
        "data_source": _TEXT,
        "ability": _TEXT,
        "reward_model": pa.struct({"style": _TEXT, "ground_truth": _TEXT}),
        "extra_info": pa.struct(_EXTRA),
        "target": _MESSAGES,
    }
)


def write_parquet(path: Path, rows: Iterable[Mapping[str, object]]) -> None:
    """Write rows as a Parquet file with the columns of `SCHEMA`; keys that a row leaves out become nulls."""
    with replacing(path) as file:
        pq.write_table(pa.Table.from_pylist(list(rows), schema=SCHEMA), file)


COUNTDOWN_SOURCE = "countdown"
_COUNTDOWN_COLUMNS = ("target", "nums")
_QUESTION = (
    "Using the numbers {numbers}, write an expression whose value is {target}. You may use +, -, *, / and brackets, "
    "and must use each number exactly once. Think step by step, then give the expression alone in <answer> </answer> "
    "tags, for example <answer>(1 + 2) / 3</answer>."
)


def convert_countdown(path: Path, out: Path) -> None:
    """Convert a file of TinyZero's Countdown, whose rows are {target: 98, nums: [44, 19, 35]}, to prompts with ground
    truths.

    Raises:
        DataError: a target or a number is not an integer; the message names the row.
    """
    files, rows = RowFiles([path], columns=_COUNTDOWN_COLUMNS, required=_COUNTDOWN_COLUMNS), []
    for index, row in enumerate(files):
        target, numbers = row["target"], row["nums"]
        if not isinstance(numbers, list) or not numbers or not all(type(n) is int for n in (target, *numbers)):
            raise DataError(f"{files.where(index)}: got {dict(row)}, expected integers, target and nums")
        rows.append(
            {
                "prompt": [{"role": "user", "content": _QUESTION.format(numbers=numbers, target=target)}],
                "data_source": COUNTDOWN_SOURCE,
                "ability": "math",
                "reward_model": {
                    "style": "rule",
                    "ground_truth": json.dumps({"numbers": numbers, "target": target}),
                },
                "extra_info": {"index": index, "split": path.stem},
            }
        )
    out.parent.mkdir(parents=True, exist_ok=True)
    write_parquet(out, rows)


def write_distinct(paths: Sequence[Path], out: Path) -> int:
    """Write the first row of each prompt in Parquet files, with all columns, and return how many rows were left out.

    DAPO-Math-17k, for example, has every prompt about a hundred times. The files must have the same columns.

    Raises:
        DataError: a file has no column `prompt`, or other columns than the first file.
    """
    seen, num_left_out, writer = set[str](), 0, None
    out.parent.mkdir(parents=True, exist_ok=True)
    try:
        for path in paths:
            with reading(path, "a Parquet file"), pq.ParquetFile(path) as file:
                schema = file.schema_arrow.remove_metadata()
                if "prompt" not in schema.names:
                    raise DataError(f"{path}: column 'prompt' is missing; there are: {', '.join(schema.names)}")
                if writer is None:
                    writer = pq.ParquetWriter(out, schema)
                elif schema != writer.schema:
                    raise DataError(f"{path}: has columns {schema.names}, expected those of {paths[0]}, types included")
                for batch in file.iter_batches():
                    keep = []
                    for prompt in batch.column("prompt").to_pylist():
                        key = json.dumps(prompt, sort_keys=True)
                        keep.append(key not in seen)
                        seen.add(key)
                    num_left_out += keep.count(False)
                    writer.write_batch(batch.filter(pa.array(keep)).replace_schema_metadata(None))
    finally:
        if writer is not None:
            writer.close()
    return num_left_out
