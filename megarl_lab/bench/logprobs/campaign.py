"""The order of a run: times first, contenders taking turns, then memory, each in processes that did nothing else."""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace

import torch

from megarl.errors import WorkerError
from megarl.report.summary import format_duration
from megarl_lab.bench.logprobs.contenders import CONTENDERS, HeadContender, Kind
from megarl_lab.bench.logprobs.memory import PEAK_MEMORY
from megarl_lab.bench.logprobs.problem import differences, solve_dense
from megarl_lab.bench.logprobs.processes import Contestants, UnavailableError
from megarl_lab.bench.logprobs.records import GIB, MIB, HeadAgreement, Measurement, Report, Size

# More rows than a contender's chunk, so that chunks must be put together.
SMALL_ROWS, SMALL_VOCAB, SMALL_HIDDEN = 600, 1000, 32
# Relative to the largest element: sums of float32 products, and bfloat16's eight bits in logits of size 10.
TOLERANCES = {"float32": 1e-5, "bfloat16": 2e-2}
# Weight shard, its gradient, and a product that is added to it.
_WEIGHT_COPIES = 3
PACKAGES = ("torch", "megatron-core", "liger-kernel", "triton", "cut-cross-entropy")


@dataclass(frozen=True, slots=True, kw_only=True)
class CampaignSettings:
    """The measurements of a run.

    timed_rows: times are taken up to that many rows. exact_rows: as many are compared with dense float64 at the largest
    vocabulary too, if a single rank has all of it.
    """

    device: str
    dtype: str
    world_size: int
    contenders: Sequence[str]
    sizes: Sequence[Size]
    timed_rows: int
    exact_rows: int
    rounds: int
    main_grad: bool
    kernels: str

    @property
    def timed_sizes(self) -> list[Size]:
        return [size for size in self.sizes if size.rows <= self.timed_rows]

    @property
    def itemsize(self) -> int:
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype.itemsize


def predicted_bytes(contender: HeadContender, size: Size, *, world_size: int, itemsize: int) -> int:
    """Bytes that each rank needs at the least: what is kept of [N, V/tp] logits, and the weight's share."""
    shard = size.vocab // world_size
    return size.rows * shard * contender.kept_bytes(itemsize) + _WEIGHT_COPIES * shard * size.hidden * itemsize


class CampaignProgress:
    """A line per measurement, with the time left if work goes on as it did."""

    # The cost of starting processes, in logits worked on.
    START = 1.5e8

    def __init__(self, settings: CampaignSettings, *, clock: Callable[[], float] = time.monotonic) -> None:
        timed = [self.work(size) for size in settings.timed_sizes for _ in range(settings.rounds)]
        measured = [self.work(size) + self.START for size in settings.sizes]
        num_all = len(settings.contenders)
        num_heads = sum(CONTENDERS.get(name).kind is not Kind.BOUND for name in settings.contenders)
        self._total = num_all * (sum(timed) + self.START) + num_heads * sum(measured)
        self._count = num_all * (len(timed) + 1) + num_heads * len(measured)
        self._clock, self._began, self._done, self._number = clock, clock(), 0.0, 0

    @staticmethod
    def work(size: Size) -> float:
        return float(size.vocab * size.rows)

    def advance(self, work: float, line: str) -> None:
        self._done += work
        self._number += 1
        left = (self._clock() - self._began) * max(0.0, self._total / self._done - 1.0)
        print(f"[{self._number}/{self._count}] {line}; {format_duration(left)} left", flush=True)


@dataclass(kw_only=True)
class HeadCampaign:
    """Runs what its settings say, and collects it."""

    settings: CampaignSettings
    measurements: dict[tuple[str, Size], Measurement] = field(default_factory=dict)
    agreements: dict[str, HeadAgreement] = field(default_factory=dict)
    relative_errors: dict[str, dict[str, float]] = field(default_factory=dict)
    unavailable: dict[str, str] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)

    def run(self) -> Report:
        settings, self.progress = self.settings, CampaignProgress(self.settings)
        self.time_in_turns()
        timed_too = () if PEAK_MEMORY[settings.device].in_fresh_processes else settings.timed_sizes
        for size in settings.sizes:
            for name in self._measured() if size not in timed_too else ():
                self._measure_memory_alone(name, size)
        return Report(
            device=settings.device,
            dtype=settings.dtype,
            main_grad=settings.main_grad,
            itemsize=settings.itemsize,
            world_size=settings.world_size,
            versions=self.versions,
            agreements=list(self.agreements.values()),
            measurements=list(self.measurements.values()),
            relative_errors=self.relative_errors,
            unavailable=self.unavailable,
        )

    def time_in_turns(self) -> None:
        """Compare each contender with float64, then time them round by round; each round starts with another one."""
        settings = self.settings
        with ExitStack() as stack:
            started = {name: group for name in settings.contenders if (group := self._enter(name, stack))}
            if settings.exact_rows and settings.world_size == 1:
                size = replace(max(settings.sizes), rows=settings.exact_rows)
                for name in [name for name in self._measured() if name in started]:
                    self._compare_exactly(name, size, started[name])
            for size in settings.timed_sizes:
                names = [name for name in started if name not in self.unavailable]
                names = [name for name in names if self._fits(name, size, started[name])]
                for turn in range(settings.rounds if names else 0):
                    for name in names[turn % len(names) :] + names[: turn % len(names)]:
                        self._time(name, size, started[name], turn)
                if not PEAK_MEMORY[settings.device].in_fresh_processes:
                    for name in self._measured():
                        self._measure_memory(name, size, started[name])

    def _enter(self, name: str, stack: ExitStack) -> Contestants | None:
        """Processes that stay for all rounds, checked against float64; None for a contender that fails.

        Raises UnavailableError if one that is not optional cannot be imported.
        """
        try:
            group = stack.enter_context(self._start(name))
            agreement = self._compare(name, group)
        except (UnavailableError, WorkerError) as error:
            if isinstance(error, UnavailableError) and not CONTENDERS.get(name).optional:
                raise
            self._leave_out(name, str(error), CampaignProgress.START)
            return None
        if agreement is not None:
            self.agreements[name] = agreement
        self.versions |= group.ask("versions", PACKAGES)[0]
        self.progress.advance(CampaignProgress.START, f"{name}: {_describe(agreement)}")
        return group

    def _leave_out(self, name: str, why: str, work: float) -> None:
        """Go on without a contender that failed; what was measured of it stays."""
        self.unavailable[name] = why
        self.progress.advance(work, f"{name}: cannot run, {why}")

    def _start(self, name: str) -> Contestants:
        s = self.settings
        return Contestants(
            name,
            world_size=s.world_size,
            device=s.device,
            dtype=s.dtype,
            main_grad=s.main_grad,
            kernels=s.kernels,
        )

    def _measured(self) -> list[str]:
        """Contenders that have a memory of their own and could be run."""
        names = [name for name in self.settings.contenders if name not in self.unavailable]
        return [name for name in names if CONTENDERS.get(name).kind is not Kind.BOUND]

    def _compare(self, name: str, group: Contestants) -> HeadAgreement | None:
        """How far the contender is from dense float64 on a small problem; None for what computes no log-probs."""
        settings = self.settings
        size = Size(vocab=SMALL_VOCAB * settings.world_size, rows=SMALL_ROWS, hidden=SMALL_HIDDEN)
        answers = group.ask("answer", size)
        if CONTENDERS.get(name).kind is Kind.BOUND:
            return None
        dense = solve_dense(
            size,
            world_size=settings.world_size,
            dtype=getattr(torch, settings.dtype),
            with_entropy=answers[0].entropy is not None,
        )
        tolerance = TOLERANCES[settings.dtype]
        return HeadAgreement(contender=name, tolerance=tolerance, differences=differences(answers, dense))

    def _compare_exactly(self, name: str, size: Size, group: Contestants) -> None:
        try:
            (self.relative_errors[name],) = group.ask("relative_errors", size)
        except (UnavailableError, WorkerError) as error:
            self._leave_out(name, f"{size}: {error}", 0.0)

    def _time(self, name: str, size: Size, group: Contestants, turn: int) -> None:
        if name in self.unavailable:
            return
        try:
            times = group.ask("times", size)
        except (UnavailableError, WorkerError) as error:
            self._leave_out(name, f"{size}: {error}", CampaignProgress.work(size))
            return
        forward_s, total_s = (max(each) for each in zip(*times, strict=True))
        known = self._known(name, size)
        self.measurements[name, size] = replace(
            known, forward_s=[*known.forward_s, forward_s], total_s=[*known.total_s, total_s]
        )
        seconds = f"forward {forward_s:.3f} s, with backward {total_s:.3f} s"
        round_of = f"round {turn + 1} of {self.settings.rounds}"
        self.progress.advance(CampaignProgress.work(size), f"{size} {name}, {round_of}: {seconds}")

    def _measure_memory_alone(self, name: str, size: Size) -> None:
        """Peak memory and collectives in fresh processes."""
        with self._start(name) as group:
            # First use of the code is then behind us.
            self._compare(name, group)
            self._measure_memory(name, size, group)

    def _measure_memory(self, name: str, size: Size, group: Contestants) -> None:
        """Peak memory and collectives; a prediction if the memory would not do."""
        work = CampaignProgress.work(size) + CampaignProgress.START
        if not self._fits(name, size, group):
            total = self._known(name, size).predicted_bytes or 0
            self.progress.advance(work, f"{size} {name}: predicted out of memory, {total / GIB:.1f} GiB")
            return
        try:
            ranks = group.ask("footprint", size)
        except (UnavailableError, WorkerError) as error:
            self._leave_out(name, f"{size}: {error}", work)
            return
        memory_bytes = max(rank.memory_bytes for rank in ranks)
        self.measurements[name, size] = replace(
            self._known(name, size), memory_bytes=memory_bytes, forward=ranks[0].forward, backward=ranks[0].backward
        )
        self.progress.advance(work, f"{size} {name}: {memory_bytes / MIB:.0f} MiB")

    def _fits(self, name: str, size: Size, group: Contestants) -> bool:
        """Whether the memory that is left will do; if not, what it would need is recorded."""
        settings = self.settings
        needed = predicted_bytes(CONTENDERS.get(name), size, world_size=settings.world_size, itemsize=settings.itemsize)
        fits = needed <= min(group.ask("available_bytes"))
        if not fits:
            total = needed * settings.world_size
            self.measurements[name, size] = replace(self._known(name, size), predicted_bytes=total)
        return bool(fits)

    def _known(self, name: str, size: Size) -> Measurement:
        return self.measurements.get((name, size), Measurement(contender=name, size=size))


def _describe(agreement: HeadAgreement | None) -> str:
    if agreement is None:
        return "ready"
    worst = max(agreement.differences.values())
    return f"{'agrees with' if agreement.agrees else 'DISAGREES with'} float64, difference {worst:.1e}"


def gemm_bound_s(measurements: Mapping[str, Measurement], num_gemms: int) -> float | None:
    """Seconds of that many products of one size: 4 as measured; 3 without the one that forward has."""
    bound = next((m for name, m in measurements.items() if CONTENDERS.get(name).kind is Kind.BOUND), None)
    if bound is None or bound.median_total_s is None or bound.median_forward_s is None:
        return None
    return bound.median_total_s if num_gemms == 4 else bound.median_total_s - bound.median_forward_s
