"""Write and read back the samples of a run (RUN/rollouts/step_*.parquet) and the judged answers of validations and
evaluations, and estimate accuracy from these.
"""

import math
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq

from megarl.data.answer_span import final_answer
from megarl.errors import DataError
from megarl.host.reading import RESTORE, reading
from megarl.host.unicode import plain
from megarl.host.writing import replacing
from megarl.record.turns import TURNS_TYPE, Turn, last_turn, prompt_text, read_turns, turns_of
from megarl.types import FinishReason, Prompt, Reward, Sample

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


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
    _write(path, rows, ROLLOUT_SCHEMA)


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


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgedAnswer:
    """One judged answer. A prompt has at most one `greedy` answer, and several sampled ones.

    data: the data file, named by the end of its path, as long as needed to tell it from the other files.
    """

    data: str
    data_source: str
    uid: str
    sample_index: int
    greedy: bool
    prompt: str
    response: str
    ground_truth: str
    reward: float
    correct: bool
    finish_reason: str
    num_response_tokens: int
    # For a conversation: the response by authors, and how many tools were called.
    turns: tuple[Turn, ...] = ()
    num_calls: int = 0

    @classmethod
    def of(
        cls,
        prompt: Prompt,
        sample: Sample,
        reward: Reward,
        *,
        greedy: bool,
        tokenizer: "PreTrainedTokenizerBase",
        data: str = "",
    ) -> "JudgedAnswer":
        """Make the record of a sample that was judged."""
        return cls(
            data=data,
            data_source=prompt.data_source,
            uid=sample.uid,
            sample_index=sample.sample_index,
            greedy=greedy,
            prompt=prompt_text(sample, tokenizer),
            response=str(tokenizer.decode(sample.response_token_ids)),
            ground_truth=prompt.ground_truth,
            reward=reward.score,
            correct=reward.correct,
            finish_reason=sample.finish_reason.value,
            num_response_tokens=len(sample.response_token_ids),
            turns=turns_of(sample, tokenizer),
            num_calls=0 if sample.episode is None else sample.episode.num_calls,
        )


_ANSWER_SCHEMA = pa.schema([(name, ARROW_TYPES[kind]) for name, kind in JudgedAnswer.__annotations__.items()])


def write_answers(path: Path, answers: Sequence[JudgedAnswer]) -> None:
    """Write answers as parquet; the file appears complete or not at all."""
    _write(path, answers, _ANSWER_SCHEMA)


def _write(path: Path, rows: Sequence[RolloutRecord | JudgedAnswer], schema: pa.Schema) -> None:
    table = pa.Table.from_pylist([plain(asdict(row)) for row in rows], schema=schema)
    with replacing(path) as partial:
        pq.write_table(table, partial)


def read_answers(path: Path) -> list[JudgedAnswer]:
    """Read the answers that `write_answers` wrote; files of earlier versions have no turns."""
    with reading(path, "a file of answers", remedy=RESTORE):
        rows = pq.read_table(path, schema=_ANSWER_SCHEMA).to_pylist()
    return [
        JudgedAnswer(**{**row, "turns": read_turns(row["turns"]), "num_calls": row["num_calls"] or 0}) for row in rows
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceResult:
    """The results on one data source of one file.

    avg: share of correct answers among `num_samples` per prompt, mean over prompts (avg@n). avg_std_error: its standard
    error over prompts, sd / √num_prompts; None for a single prompt. pass_at: k → pass@k, mean over prompts. maj:
    accuracy of the majority of a prompt's answers (maj@n), see `majority_correct`. greedy: accuracy of greedy answers,
    None without any. reward, response_tokens, truncated_frac: means over sampled answers. turns, tool_calls: means over
    sampled conversations, of the policy's turns and of the tools called; None without any. num_unjudged: how many
    answers nobody could judge, which all others leave out.
    """

    data: str
    data_source: str
    num_prompts: int
    num_samples: int
    avg: float
    avg_std_error: float | None
    pass_at: Mapping[int, float]
    maj: float
    greedy: float | None
    reward: float
    response_tokens: float
    truncated_frac: float
    turns: float | None = None
    tool_calls: float | None = None
    num_unjudged: int = 0


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Estimate, without bias, the probability that at least one of k answers is correct.

    From n answers of which c are correct: 1 − C(n − c, k) / C(n, k) (arXiv:2107.03374).
    """
    if not 0 <= num_correct <= num_samples or not 1 <= k <= num_samples:
        raise ValueError(f"pass@{k} of {num_correct} correct answers among {num_samples}: expected 1 <= k <= n, c <= n")
    return 1 - math.comb(num_samples - num_correct, k) / math.comb(num_samples, k)


def majority_correct(answers: Sequence[JudgedAnswer]) -> float:
    """Return whether the majority's final answer is correct, as a share: 1 if it is, 0 if not.

    The majority are the answers of a prompt with the most frequent final answer (see `final_answer`), compared as text
    without spaces; responses without a final answer do not vote, and only the last turn of a conversation counts. If
    several are most frequent, the result is the mean over them. It is 0 if no response has a final answer.
    """
    votes: dict[str, list[bool]] = defaultdict(list)
    for answer in answers:
        if text := final_answer(last_turn(answer.turns, answer.response)):
            votes["".join(text.split())].append(answer.correct)
    most = max(map(len, votes.values()), default=0)
    return _mean([_mean([float(c) for c in group]) for group in votes.values() if len(group) == most] or [0.0])


def results_by_source(
    answers: Sequence[JudgedAnswer], ks: Sequence[int], unjudged: Mapping[tuple[str, str], int] | None = None
) -> list[SourceResult]:
    """Compute a result for each data source of each file that has sampled answers, sorted by name.

    Answers that could not be judged may be missing; pass@k of a prompt with fewer than k answers uses all that it has.
    unjudged: their number by file and data source.
    """
    by_source: dict[tuple[str, str], list[JudgedAnswer]] = defaultdict(list)
    for answer in answers:
        by_source[answer.data, answer.data_source].append(answer)
    sampled = sorted({(answer.data, answer.data_source) for answer in answers if not answer.greedy})
    return [_result(*each, by_source[each], ks, (unjudged or {}).get(each, 0)) for each in sampled]


def _result(
    data: str, source: str, answers: Sequence[JudgedAnswer], ks: Sequence[int], num_unjudged: int
) -> SourceResult:
    sampled = [answer for answer in answers if not answer.greedy]
    by_prompt: dict[str, list[JudgedAnswer]] = defaultdict(list)
    for answer in sampled:
        by_prompt[answer.uid].append(answer)
    counts = [(len(group), sum(answer.correct for answer in group)) for group in by_prompt.values()]
    shares = [correct / total for total, correct in counts]
    greedy = [float(answer.correct) for answer in answers if answer.greedy]
    conversations = [answer for answer in sampled if answer.turns]
    return SourceResult(
        data=data,
        data_source=source,
        num_prompts=len(by_prompt),
        num_samples=max(total for total, _ in counts),
        avg=_mean(shares),
        avg_std_error=statistics.stdev(shares) / math.sqrt(len(shares)) if len(shares) > 1 else None,
        pass_at={k: _mean([pass_at_k(total, correct, min(k, total)) for total, correct in counts]) for k in ks},
        maj=_mean([majority_correct(group) for group in by_prompt.values()]),
        greedy=_mean(greedy) if greedy else None,
        reward=_mean([answer.reward for answer in sampled]),
        response_tokens=_mean([float(answer.num_response_tokens) for answer in sampled]),
        truncated_frac=_mean([float(answer.finish_reason == FinishReason.LENGTH) for answer in sampled]),
        turns=_mean([1.0 + sum(turn.is_read for turn in answer.turns) for answer in conversations])
        if conversations
        else None,
        tool_calls=_mean([float(answer.num_calls) for answer in conversations]) if conversations else None,
        num_unjudged=num_unjudged,
    )


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)
