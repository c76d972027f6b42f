"""Define the interface between a run and the judges of its samples: rules, services and reward models.

A judge works on one batch at a time. It receives each sample as soon as the sample is generated, so that judging and
generation overlap. At the end of the batch it returns the rewards of all samples.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, Self

from megarl.types import Prompt, Reward, Sample


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedSample:
    """A finished sample in the form that judges read; the text `response` has no special tokens."""

    prompt: Prompt
    sample: Sample
    prompt_text: str
    response: str

    @property
    def label(self) -> str:
        """Return a name of the sample for log and error messages."""
        return f"{self.sample.uid}/{self.sample.sample_index}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Tally:
    """A number to log about judging: a count, or if `over` is set, a sum over this many items, which is logged as
    their mean.
    """

    total: float
    over: int | None = None

    @property
    def value(self) -> float:
        """Return the count, or the mean; 0 for a mean over no items."""
        return self.total if self.over is None else self.total / max(self.over, 1)


def mean_of(values: Iterable[float]) -> Tally:
    """Return a `Tally` that is logged as the mean of these numbers."""
    listed = list(values)
    return Tally(total=float(sum(listed)), over=len(listed))


def tally_metrics(tallies: Iterable[Mapping[str, Tally]]) -> dict[str, float]:
    """Combine the tallies of batches: counts are added, means are over all items. A mean over no items is left out."""
    sums: dict[str, Tally] = {}
    for each in tallies:
        for name, tally in each.items():
            so_far = sums.get(name, Tally(total=0.0, over=None if tally.over is None else 0))
            assert (so_far.over is None) == (tally.over is None), f"{name} is a count and a mean"
            over = None if so_far.over is None else so_far.over + (tally.over or 0)
            sums[name] = Tally(total=so_far.total + tally.total, over=over)
    return {name: tally.value for name, tally in sums.items() if tally.over != 0}


@dataclass(frozen=True, slots=True, kw_only=True)
class Trouble:
    """A sample that a judge could not judge, or in which it found no answer.

    outcome: `parse_failed` (no answer was found), `timed_out`, `crashed`, `failed` (an exception), `abstained` (no
    function has an opinion), `unanswered` (no service or model gave a verdict) or `unread` (a model wrote
    none). reason: why, in one line. output: what the judge printed or wrote.
    """

    item: FinishedSample
    outcome: str
    reason: str
    output: str = ""
    judge: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """The result of judging a batch: rewards in the order in which samples were added, tallies to log, by metric name,
    and the samples with troubles.
    """

    rewards: Sequence[Reward]
    tallies: Mapping[str, Tally] = field(default_factory=dict)
    troubles: Sequence[Trouble] = ()


class JudgeSession(Protocol):
    """A judge's work on one batch."""

    def add(self, item: FinishedSample) -> None:
        """Accept a finished sample and start to judge it, without waiting for its reward."""

    def is_ready(self) -> bool:
        """Return whether all rewards that were asked for have come; `finish` may still have to ask for others."""

    def absorb(self, other: Self) -> None:
        """Take over all samples of another session of this judge, after this session's own; the other one is void."""

    def finish(self) -> Judged:
        """Wait for the rewards of all added samples, and return them."""


class Judge(Protocol):
    """A judge gives rewards to samples, a batch at a time."""

    def begin(self) -> JudgeSession:
        """Begin to judge a batch, and return the session that its samples are added to."""

    def close(self) -> None:
        """End all processes and connections that the judge has opened."""
