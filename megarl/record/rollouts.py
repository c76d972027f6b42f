"""Write and read back the samples of a run: RUN/rollouts/step_*.parquet."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from megarl.errors import DataError
from megarl.host.reading import RESTORE, reading
from megarl.host.unicode import plain
from megarl.host.writing import replacing
from megarl.record.turns import TURNS_TYPE, Turn, read_turns


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutRecord:
    """One sampled response as text, with its reward: a row of RUN/rollouts/step_*.parquet."""

    step: int
    uid: str
    sample_index: int
    data_source: str
    prompt: str
    response: str
    ground_truth: str
    reward: float
    finish_reason: str
    num_prompt_tokens: int
    num_response_tokens: int
    # Whether the response counts as right, and what else the scorer said, numbers or not, by name, as JSON.
    correct: bool = False
    details: str = "{}"
    # Per response token: its text, the engine's log-prob (None: no engine sampled it), and of a row that was trained on
    # the trainer's log-prob and the advantage; with CPO also d in nats, and the advantage before shaping; with a
    # teacher the divergence from it in nats. Empty: not known.
    tokens: tuple[str, ...] = ()
    rollout_logprobs: tuple[float | None, ...] = ()
    old_logprobs: tuple[float, ...] = ()
    advantage: tuple[float, ...] = ()
    hint_gain: tuple[float, ...] = ()
    base_advantage: tuple[float, ...] = ()
    divergence: tuple[float, ...] = ()
    # For a conversation: the response by authors, and how many tools were called.
    turns: tuple[Turn, ...] = ()
    num_calls: int = 0


ARROW_TYPES = {
    int: pa.int64(),
    str: pa.string(),
    float: pa.float64(),
    bool: pa.bool_(),
    tuple[str, ...]: pa.list_(pa.string()),
    tuple[float, ...]: pa.list_(pa.float64()),
    tuple[float | None, ...]: pa.list_(pa.float64()),
    tuple[Turn, ...]: TURNS_TYPE,
}
TOKEN_COLUMNS = (
    *("tokens", "rollout_logprobs", "old_logprobs", "advantage", "hint_gain", "base_advantage", "divergence"),
)
# Columns that files of earlier versions lack, with what such a file would say.
_LATER_COLUMNS: Mapping[str, object] = {**{key: [] for key in (*TOKEN_COLUMNS, "turns")}, "num_calls": 0}
ROLLOUT_SCHEMA = pa.schema([(name, ARROW_TYPES[kind]) for name, kind in RolloutRecord.__annotations__.items()])


def write_rollouts(path: Path, rows: Sequence[RolloutRecord]) -> None:
    """Write the rows as parquet; the file appears complete or not at all."""
    table = pa.Table.from_pylist([plain(asdict(row)) for row in rows], schema=ROLLOUT_SCHEMA)
    with replacing(path) as partial:
        pq.write_table(table, partial)


def read_rollouts(path: Path) -> list[RolloutRecord]:
    """Read the rows of one rollout file; a file with another schema raises `DataError`."""
    with reading(path, "a rollout file, parquet as megarl writes it", remedy=RESTORE):
        table = pq.read_table(path)
        table.validate(full=True)
    for name, value in _LATER_COLUMNS.items():
        if name not in table.column_names:
            table = table.append_column(name, pa.array([value] * len(table), ROLLOUT_SCHEMA.field(name).type))
    # The columns of earlier versions have another order, and their turns other fields.
    found = {field.name: field for field in table.schema if field.name != "turns"}
    if found != {field.name: field for field in ROLLOUT_SCHEMA if field.name != "turns"}:
        raise DataError(
            f"{path}: got columns {table.column_names}, expected {ROLLOUT_SCHEMA.names} as megarl writes them"
        )
    return [
        RolloutRecord(
            **{**row, **{name: tuple(row[name]) for name in TOKEN_COLUMNS}, "turns": read_turns(row["turns"])}
        )
        for row in table.to_pylist()
    ]
