"""Write prompt files in verl's schema."""

from collections.abc import Iterable, Mapping
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

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
