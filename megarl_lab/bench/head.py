"""Time and memory of the log-prob head over a sharded vocabulary, beside its peers or with a teacher's distribution:

    python -m megarl_lab.bench.head --out head.json
    python -m megarl_lab.bench.head --device cuda --teacher --out teacher.json

Contenders take turns in the same processes, from hidden states to the gradients of hidden states and weight. Memory is
the peak over inputs, gradients included, of the rank with most. Seconds are those of the slowest rank, on CPU of its
own work, so that others on the machine count little. A ratio is to a head of megarl in the same round: for a teacher
(centering and tv: an earlier policy) the one without in the same memory mode, else `recompute`. The error is the
largest difference of a gradient from dense float64 at a small size, relative to its largest element. Exits with 1 if it
exceeds the tolerance for a head of megarl, or if a teacher takes more than --at-most times the time without.
"""

import argparse
import importlib
import importlib.metadata
import json
import os
import pickle
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from multiprocessing import get_context
from pathlib import Path
from types import MappingProxyType

import torch
import torch.distributed as dist

from megarl.errors import ConfigError
from megarl.host.device.accelerators import nvidia_devices
from megarl.host.device.platform import PLATFORMS, apply_environment, platform
from megarl.parallel.head.memory_mode import HeadMemoryMode
from megarl.record.text_table import align
from megarl_lab.bench.head_contenders import CONTENDERS, Head
from megarl_lab.bench.head_problem import Inputs, Size, dense_gradients
from megarl_lab.bench.memory import PEAK_MEMORY

MIB = 1 << 20
# A size whose dense answer is quick; chunks must be put together. Every rank has `vocab` of the vocabulary.
SMALL = Size(vocab=1000, rows=600, hidden=32, chunk=256)
TOLERANCES: Mapping[str, float] = MappingProxyType({"float32": 1e-5, "bfloat16": 3e-2})
PACKAGES = ("torch", "megatron-core", "liger-kernel", "triton", "cut-cross-entropy")
_TEACHERS = (
    *(f"reverse {mode}" for mode in HeadMemoryMode),
    *(f"{name} recompute" for name in ("forward", "jsd", "centering", "tv")),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Defaults:
    """Contenders and size of a kind of run, and how often a head with a teacher may take the time of one without."""

    contenders: Sequence[str]
    size: Size
    at_most: float


DEFAULTS: Mapping[tuple[str, bool], Defaults] = MappingProxyType(
    {
        ("cpu", False): Defaults(
            contenders=("recompute", "keep", "in_chunk", "megatron_verl", "liger_fallback"),
            size=Size(vocab=151936, rows=4096, hidden=512),
            at_most=2.2,
        ),
        ("cuda", False): Defaults(
            contenders=(
                *("recompute", "keep", "in_chunk", "recompute_torch"),
                *("megatron_verl", "megatron_fused", "liger_fallback", "liger_linear", "cut_cross_entropy"),
            ),
            size=Size(vocab=151936, rows=8192, hidden=4096),
            at_most=1.8,
        ),
        ("cpu", True): Defaults(
            contenders=_TEACHERS, size=Size(vocab=151936, rows=128, hidden=2048, chunk=64), at_most=2.2
        ),
        ("cuda", True): Defaults(
            contenders=_TEACHERS, size=Size(vocab=151936, rows=8192, hidden=2048), at_most=1.8
        ),
    }
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadRun:
    """All ranks measure this. kernels: a folder with packages that are not installed otherwise."""

    contenders: Sequence[str]
    size: Size
    device: str
    dtype: str
    world_size: int
    rounds: int
    kernels: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A rank measured these of a contender: seconds of each round, peak bytes, gradients at the small size."""

    seconds: list[float] = field(default_factory=list)
    memory: list[int] = field(default_factory=list)
    gradients: Sequence[torch.Tensor] = ()
    failure: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The measurements of a contender. ratio: to the time of `beside`, the median of rounds; None without it."""

    name: str
    seconds: Sequence[float]
    beside: str
    ratio: float | None
    memory_bytes: int
    error: float

    @property
    def row(self) -> tuple[str, ...]:
        times = f"{statistics.median(self.seconds):.3f}", f"{min(self.seconds):.3f}-{max(self.seconds):.3f}"
        ratio = "-" if self.ratio is None else f"{self.ratio:.2f}"
        return self.name, *times, ratio, f"{self.memory_bytes / MIB:,.0f}", f"{self.error:.1e}"


class BenchRank:
    """A tensor-parallel rank with its inputs."""

    def __init__(self, run: HeadRun, rank: int, directory: str) -> None:
        self.run, self.dtype, self.device = run, getattr(torch, run.dtype), platform().device()
        rendezvous = f"file://{directory}/rendezvous"
        dist.init_process_group(platform().backend, init_method=rendezvous, rank=rank, world_size=run.world_size)
        assert dist.group.WORLD is not None
        self.group: dist.ProcessGroup = dist.group.WORLD
        self.inputs = Inputs.make(run.size, rank, run.world_size, self.dtype, self.device)
        small = replace(SMALL, vocab=SMALL.vocab * run.world_size)
        self.small = Inputs.make(small, rank, run.world_size, self.dtype, torch.device("cpu")).to(self.device)

    def measure(self) -> dict[str, Found]:
        """Collect each contender's gradients at the small size, then measure all in rounds that rotate their order."""
        found, heads = dict[str, Found](), dict[str, Head]()
        for name in self.run.contenders:
            try:
                heads[name] = CONTENDERS[name].load(self.group)
            except ImportError as error:
                found[name] = Found(failure=f"{type(error).__name__}: {error}")
                continue
            x = self.small.anew()
            heads[name](x, SMALL.chunk).backward()
            assert x.hidden.grad is not None
            assert x.weight.grad is not None
            found[name] = Found(gradients=(x.hidden.grad.cpu(), x.weight.grad.cpu()))
        # In the first round pages are touched, and on CUDA kernels compiled, for the first time.
        for turn in range(1 + self.run.rounds):
            names = [name for name in self.run.contenders if not found[name].failure]
            for name in names[turn % len(names) :] + names[: turn % len(names)]:
                try:
                    seconds, memory = self._pass(heads[name])
                except torch.OutOfMemoryError as error:
                    found[name] = Found(failure=str(error).split(". ")[0])
                    continue
                if turn:
                    found[name].seconds.append(seconds)
                    found[name].memory.append(memory)
        dist.destroy_process_group()
        return found

    def _pass(self, head: Head) -> tuple[float, int]:
        """Seconds and peak bytes of forward and backward; on CUDA a second pass is timed, as memory is at hand then."""
        memory, x = PEAK_MEMORY[self.run.device](), self.inputs.anew()
        memory.begin()
        seconds = self._timed(head, x)
        peak = memory.peak_bytes()
        if self.run.device == "cuda":
            del x
            seconds = self._timed(head, self.inputs.anew())
        return seconds, peak

    def _timed(self, head: Head, x: Inputs) -> float:
        clock = time.process_time if self.run.device == "cpu" else time.perf_counter
        platform().synchronize()
        dist.barrier(self.group)
        began = clock()
        head(x, self.run.size.chunk).backward()
        platform().synchronize()
        return clock() - began


def rank_main(rank: int, run: HeadRun, directory: str) -> None:
    """Measure on one rank, and leave in the directory what was found."""
    platform().select_devices([str(rank)])
    platform().activate()
    torch.set_num_threads(1)
    # First, as it looks for Transformer Engine, which may lie in the folder but needs all of its packages.
    with suppress(ImportError), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        importlib.import_module("megatron.core")
    # About torch's new names for collectives.
    warnings.simplefilter("ignore", FutureWarning)
    # Last, so that only what is missing elsewhere is taken from it.
    sys.path.append(run.kernels)
    found = BenchRank(run, rank, directory).measure()
    Path(directory, f"{rank}.pkl").write_bytes(pickle.dumps(found))


def measure(run: HeadRun) -> tuple[list[Result], dict[str, str]]:
    """Run all ranks; return the results, and why contenders have none."""
    with tempfile.TemporaryDirectory(prefix="megarl-bench-") as directory:
        context = get_context("spawn")
        processes = [context.Process(target=rank_main, args=(rank, run, directory)) for rank in range(run.world_size)]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        if codes := [process.exitcode for process in processes if process.exitcode]:
            raise SystemExit(f"ranks ended with exit codes {codes}; the traceback is above")
        files = [Path(directory, f"{rank}.pkl") for rank in range(run.world_size)]
        ranks: list[dict[str, Found]] = [pickle.loads(file.read_bytes()) for file in files]
    failures = {name: found.failure for name, found in ranks[0].items() if found.failure}
    names = [name for name in run.contenders if name not in failures]
    seconds = {name: [max(each) for each in zip(*(r[name].seconds for r in ranks), strict=True)] for name in names}
    small, dtype = replace(SMALL, vocab=SMALL.vocab * run.world_size), getattr(torch, run.dtype)
    results = []
    for name in names:
        contender = CONTENDERS[name]
        expected = dense_gradients(small, contender.objective, run.world_size, dtype)
        got = ranks[0][name].gradients[0], torch.cat([rank[name].gradients[1] for rank in ranks])
        errors = [float((a.double() - b).abs().max() / b.abs().max()) for a, b in zip(got, expected, strict=True)]
        pairs = zip(seconds[name], seconds.get(contender.beside, ()), strict=False)
        results.append(
            Result(
                name=name,
                seconds=seconds[name],
                beside=contender.beside,
                ratio=statistics.median(ratios) if (ratios := [a / b for a, b in pairs]) else None,
                memory_bytes=max(max(rank[name].memory) for rank in ranks),
                # A NaN is no agreement.
                error=max(errors, key=lambda error: (error != error, error)),
            )
        )
    return results, failures


def parse(argv: list[str] | None = None) -> tuple[HeadRun, argparse.Namespace]:
    """Options over defaults; ConfigError for a missing device or a vocabulary that ranks cannot share."""
    parser = argparse.ArgumentParser(prog="python -m megarl_lab.bench.head", description="Time the log-prob head.")
    parser.add_argument("--device", choices=sorted(PLATFORMS), default="cpu")
    parser.add_argument("--teacher", action="store_true", help="heads with a teacher, or beside an earlier policy")
    parser.add_argument("--contenders", nargs="+", choices=sorted(CONTENDERS), metavar="NAME")
    for name in ("vocab", "rows", "hidden", "chunk"):
        parser.add_argument(f"--{name}", type=int)
    parser.add_argument("--dtype", choices=sorted(TOLERANCES), help="default: float32 on CPU, bfloat16 on CUDA")
    parser.add_argument("--tp", type=int, help="ranks; default: 2 on CPU, 1 on CUDA")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--at-most", type=float, help="allowed ratio with a teacher; default: 2.2 on CPU, 1.8 on CUDA")
    parser.add_argument("--kernels", default=str(Path(sys.prefix) / "kernels"), help="a folder with further packages")
    parser.add_argument("--out", type=Path, required=True, help="a JSON file")
    arguments = parser.parse_args(argv)
    if arguments.device == "cuda" and not nvidia_devices():
        raise ConfigError("--device cuda: no NVIDIA device is here; use --device cpu")
    on_cpu, defaults = arguments.device == "cpu", DEFAULTS[arguments.device, arguments.teacher]
    given = {name: getattr(arguments, name) for name in ("vocab", "rows", "hidden", "chunk")}
    size = replace(defaults.size, **{name: value for name, value in given.items() if value is not None})
    world_size = arguments.tp or (2 if on_cpu else 1)
    if size.vocab % world_size:
        raise ConfigError(f"--vocab: got {size.vocab} on {world_size} ranks, expected a multiple; choose another size")
    names = arguments.contenders or defaults.contenders
    arguments.at_most = arguments.at_most or defaults.at_most
    run = HeadRun(
        # Contenders that others are divided by go first.
        contenders=[*dict.fromkeys([*(CONTENDERS[name].beside for name in names), *names])],
        size=size,
        device=arguments.device,
        dtype=arguments.dtype or ("float32" if on_cpu else "bfloat16"),
        world_size=world_size,
        rounds=arguments.rounds,
        kernels=arguments.kernels,
    )
    return run, arguments


def main(argv: list[str] | None = None) -> None:
    try:
        run, arguments = parse(argv)
    except ConfigError as error:
        raise SystemExit(f"error: {error}") from error
    # Ranks inherit it, which read it as they import torch.
    os.environ["MEGARL_DEVICE"], os.environ["OMP_NUM_THREADS"] = run.device, "1"
    apply_environment()
    results, failures = measure(run)
    installed = {each.name.replace("_", "-"): each.version for each in importlib.metadata.distributions() if each.name}
    versions = {name: installed[name] for name in PACKAGES if name in installed}
    record = {"run": asdict(run), "versions": versions, "failures": failures, "results": [asdict(r) for r in results]}
    arguments.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(f"{run.device}, {run.dtype}, {run.world_size} rank(s), {run.size}; {versions}")
    header = ("contender", "s", "range", "ratio", "MiB", "error")
    print("\n".join(align([header, *(each.row for each in results)])))
    print("".join(f"{name} cannot run: {why}\n" for name, why in failures.items()), end="")
    ours = [each for each in results if CONTENDERS[each.name].is_ours]
    is_wrong = any(not each.error <= TOLERANCES[run.dtype] for each in ours)
    is_slow = any(arguments.teacher and each.ratio is not None and each.ratio > arguments.at_most for each in ours)
    raise SystemExit(is_wrong or is_slow or any(CONTENDERS[name].is_ours for name in failures))


if __name__ == "__main__":
    main()
