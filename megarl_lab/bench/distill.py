"""Time the head with a teacher beside the head without one, and beside the full-vocabulary loss of TRL's GKD trainer:

    python -m megarl_lab.bench.distill [--device cuda] --out distill.json

Every contender takes hidden states to the gradients of hidden states and weight. Counted are products, in those that
make one row of logits for every token, and the logits that kernels read, in those of one model for every token. Memory
is the peak over inputs, gradients included, of the rank with most. Seconds are CPU time where the device is the CPU, so
that other processes on the machine count little. A ratio is to the plain head of the same memory mode in the same
round; TRL's is to recompute. centering and tv stand beside an earlier policy. Exits with 1 if the exact head takes more
than --at-most times the plain one, or a chunk of logits beside it, or if a gradient differs from dense float64.
"""

import argparse
import json
import os
import pickle
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from types import MappingProxyType
from typing import Any
from unittest.mock import patch

from megarl.host.device.platform import PLATFORMS, apply_environment, platform
from megarl.parallel.head.divergence import Divergence
from megarl.record.text_table import align
from megarl.types.objectives import HeadMeasure
from megarl_lab.bench.distill_problem import BETA, FULL, MEASURES, SMALL, DistillSize, Inputs, dense_gradients

MEMORY_MODES = ("recompute", "keep", "in_chunk")
MIB = 1 << 20
# Relative to the largest element of the gradient.
TOLERANCES: Mapping[str, float] = MappingProxyType({"float32": 1e-5, "bfloat16": 3e-2})
# The teacher's logits, blocks that kernels work on, and values per token.
MAX_CHUNKS = 1.5


@dataclass(frozen=True, slots=True, kw_only=True)
class DistillRun:
    """The contenders, by name, and what is measured of them. directory: where ranks meet and leave what they found."""

    names: Sequence[str]
    size: DistillSize
    dtype: str
    device: str
    world_size: int
    rounds: int
    directory: str


# (inputs, group, chunk) → what to call backward of
Contender = Callable[[Inputs, Any, int | None], Any]


def head(memory_mode: str, compared: Divergence | HeadMeasure | None) -> Contender:
    """Return the head in a memory mode, with a teacher, beside another policy, or alone."""

    def run(x: Inputs, group: Any, chunk: int | None) -> Any:
        from megarl.parallel.head.distill import vocab_parallel_divergence
        from megarl.parallel.head.given_teachers import TeacherLogits
        from megarl.parallel.head.logprobs import HeadOptions, vocab_parallel_logprobs
        from megarl.parallel.head.memory_mode import HeadMemoryMode
        from megarl.parallel.head.statistics import vocab_shard

        shard = vocab_shard(group, len(x.weight), len(x.weight) * group.size())
        options = HeadOptions(memory_mode=HeadMemoryMode(memory_mode), chunk_tokens=chunk)
        given = (x.by_logprobs, None) if compared is None else (x.by_logprobs, None, x.by_divergence)
        if options.memory_mode is HeadMemoryMode.IN_CHUNK:
            options = replace(options, loss_gradients=lambda *_: given)
        if compared is None:
            plain = vocab_parallel_logprobs(x.hidden, x.weight, x.labels, shard=shard, options=options)
            return plain.logprobs @ x.by_logprobs
        measure = None if isinstance(compared, Divergence) else compared
        teacher = TeacherLogits(hidden=x.teacher_hidden, weight=x.teacher_weight, shard=shard, measure=measure)
        out = vocab_parallel_divergence(
            x.hidden,
            x.weight,
            x.labels,
            shard=shard,
            teacher=teacher,
            divergence=compared if isinstance(compared, Divergence) else Divergence.REVERSE,
            beta=BETA,
            options=options,
        )
        return out.logprobs @ x.by_logprobs + out.divergence @ x.by_divergence

    return run


def trl(divergence: Divergence) -> Contender:
    """Return TRL's `GKDTrainer.generalized_jsd_loss` for each token, on logits that are gathered over the ranks.

    Its beta of 0 is the forward KL, and 1 the reverse one.
    """
    beta = {Divergence.FORWARD: 0.0, Divergence.REVERSE: 1.0, Divergence.JSD: BETA}[divergence]

    def run(x: Inputs, group: Any, chunk: int | None) -> Any:
        import torch
        import torch.nn.functional as F

        student = F.log_softmax(gathered(x.hidden @ x.weight.t(), group), dim=-1)
        with torch.no_grad():
            teacher = F.log_softmax(gathered(x.teacher_hidden @ x.teacher_weight.t(), group), dim=-1)
        if beta == 0:
            jsd = F.kl_div(student, teacher, reduction="none", log_target=True)
        elif beta == 1:
            jsd = F.kl_div(teacher, student, reduction="none", log_target=True)
        else:
            weight = torch.tensor(beta, dtype=student.dtype, device=student.device)
            mixture = torch.logsumexp(torch.stack([student + (1 - weight).log(), teacher + weight.log()]), dim=0)
            of_teacher = F.kl_div(mixture, teacher, reduction="none", log_target=True)
            of_student = F.kl_div(mixture, student, reduction="none", log_target=True)
            jsd = beta * of_teacher + (1 - beta) * of_student
        logprobs = student.gather(1, x.labels[:, None])[:, 0]
        return logprobs.float() @ x.by_logprobs + jsd.sum(-1).float() @ x.by_divergence

    return run


def gathered(logits: Any, group: Any) -> Any:
    """Gather logits over ranks; the gradient of a rank's own ones is its part, as in Megatron."""
    import torch
    import torch.distributed as dist

    class Gather(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, own: Any) -> Any:
            parts = [torch.empty_like(own) for _ in range(group.size())]
            dist.all_gather(parts, own.contiguous(), group=group)
            return torch.cat(parts, -1)

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            return grad.chunk(group.size(), -1)[group.rank()].contiguous()

    return logits if group.size() == 1 else Gather.apply(logits)


CONTENDERS: Mapping[str, Contender] = MappingProxyType(
    {
        **{f"plain {memory_mode}": head(memory_mode, None) for memory_mode in MEMORY_MODES},
        **{f"{kind} {memory_mode}": head(memory_mode, kind) for kind in Divergence for memory_mode in MEMORY_MODES},
        **{f"{name} {mode}": head(mode, measure) for name, measure in MEASURES.items() for mode in MEMORY_MODES},
        **{f"{kind} trl": trl(kind) for kind in Divergence},
    }
)
DEFAULTS = (
    *(f"plain {memory_mode}" for memory_mode in MEMORY_MODES),
    *(f"reverse {memory_mode}" for memory_mode in MEMORY_MODES),
    *("forward recompute", "jsd recompute", "centering recompute", "tv recompute", "reverse trl", "jsd trl"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DistillResult:
    """The measurements of a contender. ratio: to the plain head's time, the median of rounds. error: of gradients.

    chunks: the memory beyond the plain head's, in chunks of one model's logits.
    """

    name: str
    seconds: Sequence[float]
    ratio: float
    memory_bytes: int
    chunks: float
    products: float
    passes: float
    error: float

    @property
    def row(self) -> tuple[str, ...]:
        times = f"{statistics.median(self.seconds):.3f}", f"{min(self.seconds):.3f}-{max(self.seconds):.3f}"
        counts = f"{self.products:.1f}", f"{self.passes:.1f}" if self.passes else "-"
        memory = f"{self.memory_bytes / MIB:.0f}", f"{self.chunks:.2f}"
        return self.name, *times, f"{self.ratio:.2f}", *counts, *memory, f"{self.error:.1e}"


def rank_main(rank: int, run: DistillRun) -> None:
    """Measure every contender on one rank: counts and gradients at a small size, then time and memory in turns."""
    os.environ["MEGARL_DEVICE"], os.environ["OMP_NUM_THREADS"] = run.device, "1"
    platform().select_devices([str(rank)])
    apply_environment()
    import torch
    import torch.distributed as dist

    from megarl_lab.bench.logprobs.memory import PEAK_MEMORY

    torch.set_num_threads(1)
    platform().activate()
    rendezvous = f"file://{run.directory}/rendezvous"
    dist.init_process_group(platform().backend, init_method=rendezvous, rank=rank, world_size=run.world_size)
    group: Any = dist.group.WORLD
    device, dtype, memory = platform().device(), getattr(torch, run.dtype), PEAK_MEMORY[run.device]()

    def solve(name: str, x: Inputs, chunk: int | None) -> None:
        CONTENDERS[name](x, group, chunk).backward()
        if name.endswith("trl") and group.size() > 1:
            dist.all_reduce(x.hidden.grad)

    found: dict[str, dict[str, Any]] = {key: {} for key in ("counts", "gradients", "seconds", "memory")}
    for name in run.names:
        x = Inputs(SMALL, rank, run.world_size, dtype, device)
        with counted() as counts:
            solve(name, x, SMALL.chunk)
        found["counts"][name] = counts
        found["gradients"][name] = [each.grad.cpu() for each in (x.hidden, x.weight) if each.grad is not None]
    x = Inputs(run.size, rank, run.world_size, dtype, device)
    clock = time.process_time if run.device == "cpu" else time.perf_counter
    # In the first round pages are touched, and on CUDA kernels compiled, for the first time.
    for turn in range(1 + run.rounds):
        for name in run.names:
            x.hidden.grad = x.weight.grad = None
            platform().synchronize()
            memory.begin()
            dist.barrier()
            began = clock()
            solve(name, x, run.size.chunk)
            platform().synchronize()
            if turn:
                found["seconds"].setdefault(name, []).append(clock() - began)
            found["memory"][name] = memory.peak_bytes()
    Path(run.directory, f"{rank}.pkl").write_bytes(pickle.dumps(found))
    dist.destroy_process_group()


@contextmanager
def counted() -> Iterator[dict[str, int]]:
    """Count multiplications of products, and logits that the head's kernels read."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    from megarl.parallel.head.choose import choose_kernels, choose_teacher_kernels

    counts = {"products": 0, "logits": 0}

    class Products(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func.overloadpacket.__name__ in ("mm", "addmm", "addmm_"):
                # A further argument of some is the result's type.
                left, right = [each for each in args if isinstance(each, torch.Tensor)][-2:]
                counts["products"] += left.numel() * right.shape[1]
            return func(*args, **(kwargs or {}))

    def watched(method: Callable[..., None]) -> Callable[..., None]:
        def call(kernels: Any, logits: Any, *args: Any, **rest: Any) -> None:
            models = 1 + (args[0].shape == logits.shape or "term" in rest)
            counts["logits"] += models * logits.numel()
            method(kernels, logits, *args, **rest)

        return call

    device = platform().device()
    with ExitStack() as stack, torch.autograd.set_multithreading_enabled(False):
        for kind in (type(choose_kernels(device)), type(choose_teacher_kernels(device))):
            for name in ("statistics", "mixture", "write_gradient"):
                if hasattr(kind, name):
                    stack.enter_context(patch.object(kind, name, watched(getattr(kind, name))))
        stack.enter_context(Products())
        yield counts


def measure(run: DistillRun) -> list[DistillResult]:
    """Run all ranks, and put together what they found."""
    import torch

    spawn = get_context("spawn")
    processes = [spawn.Process(target=rank_main, args=(rank, run)) for rank in range(run.world_size)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    if codes := [process.exitcode for process in processes if process.exitcode]:
        raise SystemExit(f"ranks ended with exit codes {codes}; the traceback is above")
    ranks = [pickle.loads(Path(run.directory, f"{rank}.pkl").read_bytes()) for rank in range(run.world_size)]
    first, results = ranks[0], []
    size, itemsize = run.size, getattr(torch, run.dtype).itemsize
    chunk_bytes = (size.chunk or min(size.rows, size.hidden // 2)) * size.vocab // run.world_size * itemsize
    for name in run.names:
        kind, memory_mode = name.split()
        plain = f"plain {memory_mode if memory_mode in MEMORY_MODES else 'recompute'}"
        expected = dense_gradients(kind, run.world_size, run.dtype, run.device)
        got = first["gradients"][name][0], torch.cat([each["gradients"][name][1] for each in ranks])
        errors = [float((a.double() - b).abs().max() / b.abs().max()) for a, b in zip(got, expected, strict=True)]
        memory = {each: max(rank["memory"][each] for rank in ranks) for each in (name, plain)}
        logits = SMALL.rows * SMALL.vocab // run.world_size
        pairs = zip(first["seconds"][name], first["seconds"][plain], strict=True)
        results.append(
            DistillResult(
                name=name,
                seconds=first["seconds"][name],
                ratio=statistics.median(mine / other for mine, other in pairs),
                memory_bytes=memory[name],
                chunks=(memory[name] - memory[plain]) / chunk_bytes,
                products=first["counts"][name]["products"] / logits / SMALL.hidden,
                passes=first["counts"][name]["logits"] / logits,
                error=max(errors),
            )
        )
    return results


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m megarl_lab.bench.distill", description="Time the head with a teacher."
    )
    parser.add_argument("--device", choices=sorted(PLATFORMS), default="cpu")
    for name in ("vocab", "hidden", "teacher-hidden", "rows", "chunk"):
        parser.add_argument(f"--{name}", type=int)
    parser.add_argument("--dtype", choices=sorted(TOLERANCES), help="default: float32 on CPU, bfloat16 on CUDA")
    parser.add_argument("--tp", type=int, help="ranks; default: 2 on CPU, 1 on CUDA")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--at-most", type=float, help="allowed ratio; default: 2.2 on CPU, 1.8 on CUDA")
    parser.add_argument("--contenders", nargs="+", choices=sorted(CONTENDERS), default=DEFAULTS)
    parser.add_argument("--out", type=Path, required=True, help="a JSON file")
    arguments = parser.parse_args(argv)
    on_cpu = arguments.device == "cpu"
    given = {name: getattr(arguments, name) for name in ("vocab", "hidden", "teacher_hidden", "rows", "chunk")}
    size = replace(FULL[arguments.device], **{name: value for name, value in given.items() if value is not None})
    with tempfile.TemporaryDirectory(prefix="megarl-bench-") as directory:
        run = DistillRun(
            names=[
                *dict.fromkeys([f"plain {memory_mode}" for memory_mode in MEMORY_MODES] + list(arguments.contenders))
            ],
            size=size,
            dtype=arguments.dtype or ("float32" if on_cpu else "bfloat16"),
            device=arguments.device,
            world_size=arguments.tp or (2 if on_cpu else 1),
            rounds=arguments.rounds,
            directory=directory,
        )
        results = measure(run)
    record = {"run": asdict(run), "results": [asdict(each) for each in results]}
    arguments.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    header = ("contender", "s", "range", "ratio", "products", "passes", "MiB", "chunks more", "error")
    print(f"{run.device}, {run.dtype}, {run.world_size} rank(s), {size}")
    print("\n".join(align([header, *(each.row for each in results)])), flush=True)
    at_most = arguments.at_most or (2.2 if on_cpu else 1.8)
    ours = [each for each in results if not each.name.endswith("trl")]
    is_slow = any(each.ratio > at_most for each in ours)
    is_large = any(each.chunks > MAX_CHUNKS for each in ours)
    raise SystemExit(is_slow or is_large or any(each.error > TOLERANCES[run.dtype] for each in ours))


if __name__ == "__main__":
    main()
