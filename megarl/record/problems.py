"""Record samples that judges could not judge or read, with the reasons (RUN/reward_problems.jsonl)."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import islice, zip_longest
from pathlib import Path
from typing import Literal

from megarl.host.masking import masked_text
from megarl.record.json_lines import append_lines, open_lines, read_lines
from megarl.types.judged import Trouble

# A prompt is kept from its start, a response from its end, where its answer is.
MAX_PROMPT_CHARS, MAX_RESPONSE_CHARS = 2_000, 4_000


@dataclass(frozen=True, slots=True, kw_only=True)
class ProblemRecord:
    """A sample that a judge could not judge or read at a step; its other fields are those of `Trouble`.

    phase: whether the sample was to be trained on, or belongs to a validation.
    """

    step: int
    phase: Literal["train", "validation"]
    judge: str
    outcome: str
    reason: str
    output: str
    data_source: str
    uid: str
    sample_index: int
    prompt: str
    response: str
    ground_truth: str

    @classmethod
    def of(cls, trouble: Trouble, *, step: int, phase: Literal["train", "validation"]) -> "ProblemRecord":
        """Make the record of a trouble, with texts shortened."""
        item = trouble.item
        return cls(
            step=step,
            phase=phase,
            judge=trouble.judge,
            outcome=trouble.outcome,
            reason=masked_text(trouble.reason),
            output=masked_text(trouble.output),
            data_source=item.prompt.data_source,
            uid=item.sample.uid,
            sample_index=item.sample.sample_index,
            prompt=item.prompt_text[:MAX_PROMPT_CHARS],
            response=item.response[-MAX_RESPONSE_CHARS:],
            ground_truth=item.prompt.ground_truth[-MAX_RESPONSE_CHARS:],
        )


def pick_problems(troubles: Sequence[Trouble], count: int) -> list[Trouble]:
    """Pick up to `count` troubles in turn from all judges and outcomes, so that rare ones are among them."""
    kinds: dict[tuple[str, str], list[Trouble]] = defaultdict(list)
    for each in troubles:
        kinds[each.judge, each.outcome].append(each)
    turns = (each for turn in zip_longest(*kinds.values()) for each in turn if each is not None)
    return list(islice(turns, count))


def append_problems(path: Path, records: Iterable[ProblemRecord]) -> None:
    """Append records to a run's file."""
    with open_lines(path, rotates=True) as file:
        append_lines(file, map(asdict, records))


def read_problems(path: Path) -> list[ProblemRecord]:
    """Read all records of a run; none if there is no file, because all samples were judged and read."""
    fields = "an object with the fields of a ProblemRecord"
    return read_lines(path, lambda row: ProblemRecord(**row), expected=fields, missing_ok=True)
