"""Define the interface between a run and the judges of its samples: rules, services and reward models.

A judge receives each sample as soon as the sample is generated, so that judging and generation overlap. At the end of
a step it returns the rewards of all samples of the step together.
"""

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from megarl.types import Reward
from megarl.types.judged import FinishedSample, Trouble


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
class Judged:
    """The result of judging a batch: rewards in the order in which samples were added, tallies to log, by metric name,
    and the samples with troubles.
    """

    rewards: Sequence[Reward]
    tallies: Mapping[str, Tally] = field(default_factory=dict)
    troubles: Sequence[Trouble] = ()


class JudgeSession(Protocol):
    """The samples of one group or batch with a judge."""

    def add(self, item: FinishedSample) -> None:
        """Accept a finished sample and start to judge it, without waiting for its reward."""

    def pending(self) -> Sequence[Future[object]]:
        """Return all answers that have been asked for, except those that only `Judge.finish` starts; errors of answers
        surface there, too.
        """


@dataclass(slots=True)
class Gathered:
    """A session that asks for nothing before `Judge.finish`."""

    items: list[FinishedSample] = field(default_factory=list)

    def add(self, item: FinishedSample) -> None:
        self.items.append(item)

    def pending(self) -> Sequence[Future[object]]:
        return ()


S = TypeVar("S", bound=JudgeSession)


class Judge(Protocol[S]):
    """A judge gives rewards to samples, a step at a time."""

    def begin(self) -> S:
        """Open a session to add samples to."""

    def finish(self, sessions: Sequence[S]) -> Judged:
        """Ask what is still to ask about the samples of all these sessions together, wait for the rewards, and return
        them in the order of the sessions and of `add`.
        """

    def close(self) -> None:
        """End all processes and connections that the judge has opened."""
