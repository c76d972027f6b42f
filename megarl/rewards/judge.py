"""The interface between a run and the judges of its samples: the rule, a service, a reward model.

A judge is asked about a batch. It is told of each sample as soon as that is finished, while others are still generated,
and may begin at once; in the end it answers for all of them.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from megarl.types import Prompt, Reward, Sample


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedSample:
    """A finished sample as judges read it; `response` is without special tokens."""

    prompt: Prompt
    sample: Sample
    prompt_text: str
    response: str

    @property
    def label(self) -> str:
        """The name of the sample in messages."""
        return f"{self.sample.uid}/{self.sample.sample_index}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Tally:
    """A number to log about judging: a count or, with `over`, a mean over so many things."""

    total: float
    over: int | None = None

    @property
    def value(self) -> float:
        """The count, or the mean; 0 for a mean over nothing."""
        return self.total if self.over is None else self.total / max(self.over, 1)


def mean_of(values: Iterable[float]) -> Tally:
    """Tally the mean of numbers."""
    listed = list(values)
    return Tally(total=float(sum(listed)), over=len(listed))


def tally_metrics(tallies: Iterable[Mapping[str, Tally]]) -> dict[str, float]:
    """Combine the metrics of batches: counts are summed, means are over all; means over nothing are left out."""
    sums: dict[str, Tally] = {}
    for each in tallies:
        for name, tally in each.items():
            so_far = sums.get(name, Tally(total=0.0, over=None if tally.over is None else 0))
            assert (so_far.over is None) == (tally.over is None), f"{name} is a count and a mean"
            over = None if so_far.over is None else so_far.over + (tally.over or 0)
            sums[name] = Tally(total=so_far.total + tally.total, over=over)
    return {name: tally.value for name, tally in sums.items() if tally.over != 0}


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """Rewards in the order in which items were added, and tallies to log, by metric name."""

    rewards: Sequence[Reward]
    tallies: Mapping[str, Tally] = field(default_factory=dict)


class JudgeSession(Protocol):
    """The work of a judge on one batch."""

    def add(self, item: FinishedSample) -> None:
        """Take a finished sample, without waiting for its reward."""

    def finish(self) -> Judged:
        """Wait for the rewards of all items."""


class Judge(Protocol):
    """A judge, which gives rewards to samples, a batch at a time."""

    def begin(self) -> JudgeSession:
        """Begin a batch."""

    def close(self) -> None:
        """End the processes and connections of the judge."""
