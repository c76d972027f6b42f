"""The seam between a run and whoever judges its samples.

A judge is asked about a batch. It is told of each sample when that is finished, while others are still generated, and
may begin at once; in the end it answers for all of them.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from megarl.types import Prompt, Reward, Sample


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """A finished sample as judges read it; texts are without the response's special tokens."""

    prompt: Prompt
    sample: Sample
    prompt_text: str
    response: str

    @property
    def label(self) -> str:
        """How messages name it."""
        return f"{self.sample.uid}/{self.sample.sample_index}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Tally:
    """What is counted while judging: a count, or with `over` a mean over so many things."""

    total: float
    over: int | None = None

    def __add__(self, other: "Tally") -> "Tally":
        assert (self.over is None) == (other.over is None), "a count and a mean"
        return Tally(total=self.total + other.total, over=None if self.over is None else self.over + (other.over or 0))

    @property
    def value(self) -> float:
        return self.total if self.over is None else self.total / max(self.over, 1)


def mean_of(values: Iterable[float]) -> Tally:
    """The mean of numbers."""
    listed = list(values)
    return Tally(total=float(sum(listed)), over=len(listed))


def tally_metrics(tallies: Iterable[Mapping[str, Tally]]) -> dict[str, float]:
    """Metrics of several batches together: counts are summed, means are over all; means over nothing are left out."""
    sums: dict[str, Tally] = {}
    for each in tallies:
        for name, tally in each.items():
            sums[name] = sums[name] + tally if name in sums else tally
    return {name: tally.value for name, tally in sums.items() if tally.over != 0}


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """Rewards in the order in which items were added, and what to log about them, by metric name."""

    rewards: Sequence[Reward]
    tallies: Mapping[str, Tally] = field(default_factory=dict)


class Judging(Protocol):
    """The judging of one batch."""

    def add(self, item: Item) -> None:
        """Take a finished sample; returns at once."""

    def finish(self) -> Judged:
        """Wait for a reward of every item."""


class Judge(Protocol):
    """Who judges: the rule, a service, a model."""

    def begin(self) -> Judging:
        """A new batch."""

    def close(self) -> None:
        """End what judging needed: processes, connections."""
