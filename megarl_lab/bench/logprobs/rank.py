"""One process of a contender: it loads the contender, answers the small problem, and measures."""

import datetime
import gc
import importlib.metadata
import sys
import time
import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from megarl.host.device.platform import platform
from megarl_lab.bench.logprobs.contenders import CONTENDERS
from megarl_lab.bench.logprobs.counting import count_collectives
from megarl_lab.bench.logprobs.memory import PEAK_MEMORY
from megarl_lab.bench.logprobs.problem import (
    HeadOutputs,
    HeadProblem,
    backward,
    make_problem,
    relative_errors,
    solve,
    solve_dense,
)
from megarl_lab.bench.logprobs.records import RankSpec, Size, Traffic

# A rank that waits for one that failed; the largest pass takes minutes.
_TIMEOUT = datetime.timedelta(minutes=15)


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """Peak bytes over inputs, and the traffic of both passes; None for a single rank, which has none to hand to."""

    memory_bytes: int
    forward: Traffic | None
    backward: Traffic | None


class BenchRank:
    """A tensor-parallel rank that is asked method by method; all ranks are asked the same."""

    def __init__(self, spec: RankSpec) -> None:
        self.spec, self.dtype = spec, getattr(torch, spec.dtype)

    def load(self) -> None:
        """Meet the other ranks and load the contender."""
        spec = self.spec
        torch.set_num_threads(1)
        # About torch's new names for collectives.
        warnings.simplefilter("ignore", FutureWarning)
        self.device = platform().device()
        if spec.device == "cuda":
            torch.cuda.set_device(self.device)
        rendezvous = f"file://{spec.directory}/rendezvous"
        dist.init_process_group(
            platform().backend, init_method=rendezvous, rank=spec.rank, world_size=spec.world_size, timeout=_TIMEOUT
        )
        assert dist.group.WORLD is not None
        self.group: Any = dist.group.WORLD
        # Last, so that only what is missing elsewhere is taken from it.
        sys.path.append(spec.kernels)
        self.head = CONTENDERS.get(spec.contender).load(self.group)

    def answer(self, size: Size) -> HeadOutputs:
        """The answer to a small problem, equal on every device; first use of the code is then behind us."""
        return solve(self.head, self._make(size, device="cpu").to(self.device))

    def available_bytes(self) -> int:
        return PEAK_MEMORY[self.spec.device]().available_bytes(self.spec.world_size)

    def footprint(self, size: Size) -> Footprint:
        """Memory and collectives of one forward and backward pass."""
        problem, memory = self._make(size), PEAK_MEMORY[self.spec.device]()
        has_traffic = self.spec.world_size > 1
        dist.barrier(self.group)
        memory.begin()
        with count_collectives() if has_traffic else nullcontext() as forward:
            outputs = self.head(problem)
        with count_collectives() if has_traffic else nullcontext() as behind:
            backward(problem, outputs)
        self._synchronize()
        memory_bytes = memory.peak_bytes()
        del problem, outputs
        self._give_back()
        return Footprint(
            memory_bytes=memory_bytes,
            forward=None if forward is None else forward.traffic(),
            backward=None if behind is None else behind.traffic(),
        )

    def relative_errors(self, size: Size) -> dict[str, float]:
        """How far a single rank's answer is from dense float64, which this rank's device computes."""
        answer = solve(self.head, self._make(size))
        dense = solve_dense(
            size, world_size=1, dtype=self.dtype, with_entropy=answer.entropy is not None, device=self.device
        )
        found = relative_errors(answer, dense)
        del answer, dense
        self._give_back()
        return found

    def times(self, size: Size) -> tuple[float, float]:
        """Seconds of forward, and of forward and backward. Memory is given back, since others take turns.

        On CUDA a pass goes before: it compiles what the size needs, and the allocator then has the memory at hand.
        """
        if self.spec.device == "cuda":
            # On a problem of its own, as the head writes over the hidden states.
            first = self._make(size)
            backward(first, self.head(first))
            del first
        problem = self._make(size)
        self._synchronize()
        dist.barrier(self.group)
        self._synchronize()
        marks = [self._mark()]
        outputs = self.head(problem)
        marks.append(self._mark())
        backward(problem, outputs)
        marks.append(self._mark())
        self._synchronize()
        forward_s, total_s = (self._seconds(marks[0], mark) for mark in marks[1:])
        del problem, outputs
        self._give_back()
        return forward_s, total_s

    def versions(self, packages: Sequence[str]) -> dict[str, str]:
        """The installed ones of some packages."""
        installed = importlib.metadata.distributions()
        # Remains of an installation may have no name.
        found = {each.name.replace("_", "-"): each.version for each in installed if each.name}
        return {package: found[package] for package in packages if package in found}

    def _make(self, size: Size, device: torch.device | str | None = None) -> HeadProblem:
        return make_problem(
            size,
            rank=self.spec.rank,
            world_size=self.spec.world_size,
            dtype=self.dtype,
            device=self.device if device is None else device,
            with_main_grad=self.spec.main_grad,
        )

    def _synchronize(self) -> None:
        if self.spec.device == "cuda":
            torch.cuda.synchronize()

    def _mark(self) -> Any:
        """A point in time, on CUDA in the order of the device's work."""
        if self.spec.device != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _seconds(self, begin: Any, end: Any) -> float:
        return begin.elapsed_time(end) / 1000 if self.spec.device == "cuda" else end - begin

    def _give_back(self) -> None:
        gc.collect()
        platform().release_cached_memory()
