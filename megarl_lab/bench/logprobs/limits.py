"""Limits of the head, as ratios to its peers in the same run.

Memory is compared with Liger's from `LEAST_ROWS` rows on. Times are medians of forward and backward.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType

from megarl_lab.bench.logprobs.contenders import CONTENDERS, Kind
from megarl_lab.bench.logprobs.records import HeadAgreement, Measurement, Report, Size

LEAST_ROWS = 4096
# Where fixed costs of a call stop to count.
LEAST_TIMED_ROWS = 1024


class LimitVerdict(StrEnum):
    PASS = "pass"
    FAIL = "FAIL"
    # The sizes or contenders that were asked for leave nothing to compare.
    NOTHING = "nothing to compare"


@dataclass(frozen=True, slots=True, kw_only=True)
class LocatedValue:
    """A measured value and where it was found."""

    value: float
    where: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """The largest of the figures may not exceed `at_most`."""

    name: str
    at_most: float
    figures: Callable[["Results"], Iterator[LocatedValue]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """A limit, and the figure that comes closest to it or exceeds it most."""

    limit: Limit
    worst: LocatedValue | None

    @property
    def verdict(self) -> LimitVerdict:
        if self.worst is None:
            return LimitVerdict.NOTHING
        # A NaN keeps to nothing.
        return LimitVerdict.PASS if self.worst.value <= self.limit.at_most else LimitVerdict.FAIL


class Results:
    """The measurements of a report by contender and size."""

    def __init__(self, report: Report) -> None:
        self.agreements: Sequence[HeadAgreement] = report.agreements
        self._by_place = {(m.contender, m.size): m for m in report.measurements}

    def of(self, contender: str) -> Iterator[Measurement]:
        return (m for (name, _), m in sorted(self._by_place.items(), key=str) if name == contender)

    def find(self, contender: str, size: Size) -> Measurement | None:
        return self._by_place.get((contender, size))

    def peers(self, size: Size) -> list[Measurement]:
        return [m for (name, at), m in self._by_place.items() if at == size and CONTENDERS.get(name).kind is Kind.PEER]


def _memory_of_liger(results: Results) -> Iterator[LocatedValue]:
    for mine in results.of("recompute"):
        peer = results.find("liger_fallback", mine.size)
        if mine.size.rows >= LEAST_ROWS and mine.memory_bytes and peer and peer.memory_bytes:
            yield LocatedValue(value=mine.memory_bytes / peer.memory_bytes, where=str(mine.size))


def _memory_at_four_times_the_rows(results: Results) -> Iterator[LocatedValue]:
    for small in results.of("recompute"):
        size = small.size
        large = results.find("recompute", Size(vocab=size.vocab, rows=4 * size.rows, hidden=size.hidden))
        if size.rows >= LEAST_TIMED_ROWS and small.memory_bytes and large and large.memory_bytes:
            where = f"V={size.vocab} N={size.rows}→{large.size.rows}"
            yield LocatedValue(value=large.memory_bytes / small.memory_bytes, where=where)


def _forward_collectives(results: Results) -> Iterator[LocatedValue]:
    for name in ("recompute", "keep"):
        for mine in results.of(name):
            if mine.forward is not None:
                yield LocatedValue(value=mine.forward.num_collectives, where=f"{name}, {mine.size}")


def _time_of_peers(results: Results, *, max_memory_ratio: float) -> Iterator[LocatedValue]:
    for mine in _timed(results, "recompute"):
        assert mine.median_total_s is not None
        for peer in results.peers(mine.size):
            if peer.median_total_s is None or mine.memory_bytes is None or peer.memory_bytes is None:
                continue
            if peer.memory_bytes <= max_memory_ratio * mine.memory_bytes:
                where = f"{peer.contender}, {mine.size}"
                yield LocatedValue(value=mine.median_total_s / peer.median_total_s, where=where)


def _time_of_small_peers(results: Results) -> Iterator[LocatedValue]:
    return _time_of_peers(results, max_memory_ratio=2.0)


def _time_of_any_peer(results: Results) -> Iterator[LocatedValue]:
    return _time_of_peers(results, max_memory_ratio=float("inf"))


def _keep_to_fastest(results: Results) -> Iterator[LocatedValue]:
    for mine in _timed(results, "keep"):
        times = {m.median_total_s: m.contender for m in results.peers(mine.size) if m.median_total_s is not None}
        if times and mine.median_total_s is not None:
            fastest = min(times)
            yield LocatedValue(value=mine.median_total_s / fastest, where=f"{times[fastest]}, {mine.size}")


def _timed(results: Results, name: str) -> Iterator[Measurement]:
    return (m for m in results.of(name) if m.size.rows >= LEAST_TIMED_ROWS and m.median_total_s is not None)


def _disagreement(results: Results) -> Iterator[LocatedValue]:
    for agreement in results.agreements:
        if CONTENDERS.get(agreement.contender).kind is Kind.OURS:
            for name, difference in agreement.differences.items():
                where = f"{agreement.contender}, {name}"
                yield LocatedValue(value=difference / agreement.tolerance, where=where)


LIMITS: Mapping[str, tuple[Limit, ...]] = MappingProxyType(
    {
        "cpu": (
            Limit(name="difference from float64 ÷ tolerance", at_most=1.0, figures=_disagreement),
            Limit(name="memory, recompute ÷ liger_fallback", at_most=0.4, figures=_memory_of_liger),
            Limit(name="memory at 4× the rows, recompute", at_most=1.1, figures=_memory_at_four_times_the_rows),
            Limit(name="collectives in forward, recompute and keep", at_most=1.0, figures=_forward_collectives),
            Limit(name="time, recompute ÷ peers within twice its memory", at_most=1.0, figures=_time_of_small_peers),
            Limit(name="time, recompute ÷ any peer", at_most=1.5, figures=_time_of_any_peer),
            Limit(name="time, keep ÷ the fastest peer", at_most=1.1, figures=_keep_to_fastest),
        ),
        "cuda": (Limit(name="difference from float64 ÷ tolerance", at_most=1.0, figures=_disagreement),),
    }
)


def judge(report: Report) -> list[Judgement]:
    """Each limit of the report's device with its largest figure."""
    results = Results(report)
    return [
        Judgement(
            limit=limit, worst=max(limit.figures(results), key=lambda f: (f.value != f.value, f.value), default=None)
        )
        for limit in LIMITS[report.device]
    ]
