"""Time and memory of an update with adapters (LoRA) against one of all weights, bytes of a sync, and an engine's time:

    python -m megarl_lab.bench.lora --out DIR [--smollm2 DIR] [--models smollm2 tiny] [--turns 5]

SmolLM2 is fetched and unpacked to --smollm2 unless it is there. Every contender is a process of its own with one
thread, and they take turns: one computes while the others wait. Seconds are CPU time, in which other processes do not
count. The first update, which makes the optimizer's state, is left out. An engine of each model replaces its adapters
by others that lie in memory, as it does at the end of a sync. Prints tables and whether the limits hold, and writes
DIR/records.json. Exit code 1: a limit is exceeded.
"""

import argparse
import json
import multiprocessing
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megarl.config.lora import LoraConfig
from megarl.config.schema import ActorConfig, ModelConfig, OptimizerConfig
from megarl.host.device.platform import apply_environment
from megarl.plan.devices import plan_shard
from megarl.plan.memory import DTYPE_BYTES
from megarl.record.text_table import align
from megarl.types.messages import LoadRequest, Role, RoleSpec, UpdateRequest
from megarl.weights.adapters import adapter_spec
from megarl.weights.families import ModelSpec, read_model_spec
from megarl_lab.bench.lora_engine import Replacement, replacements

TIME_LIMIT, STATE_LIMIT = 0.75, 0.15
# Milliseconds in which an engine replaces ten million elements of adapters.
REPLACEMENT_LIMIT_MS = 50.0
NUM_ROWS, PROMPT_TOKENS, RESPONSE_TOKENS = 4, 16, 112
PLANNED_CONFIG = Path(__file__).parents[2] / "configs" / "model" / "hf" / "qwen3-8b"
# (model, rank) → the most that a sync of the adapters may send, of what one of the weights sends.
SYNC_LIMITS = {("smollm2", 8): 1 / 50, ("qwen3-8b", 8): 1 / 90, ("qwen3-8b", 32): 1 / 90}
_MIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateCost:
    """The cost of a model's updates. rank: of the adapters; 0: all weights are trained. seconds: by turn."""

    model: str
    rank: int
    seconds: tuple[float, ...]
    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int

    @property
    def median_s(self) -> float:
        return statistics.median(self.seconds)

    @property
    def state_bytes(self) -> int:
        return self.gradient_bytes + self.optimizer_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncBytes:
    """Bytes that an engine of one worker receives in a sync, and that a trainer on one device holds, by plan.

    A trainer holds weights, gradients and optimizer; held_bytes_full: when all weights are trained.
    """

    model: str
    rank: int
    weight_bytes: int
    adapter_bytes: int
    held_bytes: int
    held_bytes_full: int

    @property
    def ratio(self) -> float:
        return self.adapter_bytes / self.weight_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraLimit:
    """A measured figure and the most that it may be."""

    name: str
    got: float
    at_most: float
    unit: str = "of that of all weights"

    @property
    def holds(self) -> bool:
        return self.got <= self.at_most


def actor_settings(rank: int) -> ActorConfig:
    """Train adapters of a rank, or with 0 all weights."""
    lora = LoraConfig(rank=rank, alpha=rank) if rank else None
    return ActorConfig(lora=lora, optimizer=OptimizerConfig(weight_decay=0.0))


class Contender:
    """A process that trains a model, whose updates are timed one by one."""

    def __init__(self, model: str, path: Path, rank: int) -> None:
        self.model, self.rank, self.seconds = model, rank, list[float]()
        self._pool = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), _load, (str(path), rank))

    def update(self) -> float:
        return self._pool.submit(_timed_update).result()

    def finish(self) -> UpdateCost:
        sizes = self._pool.submit(_sizes).result()
        self._pool.shutdown()
        return UpdateCost(model=self.model, rank=self.rank, seconds=tuple(self.seconds), **sizes)


def measure(model: str, path: Path, ranks: Sequence[int], turns: int) -> list[UpdateCost]:
    """Time updates with adapters of each rank, and of all weights, in turns."""
    contenders = [Contender(model, path, rank) for rank in (0, *ranks)]
    for each in contenders:
        each.update()
    for turn in range(turns):
        # Each begins as often as the others.
        for i in range(len(contenders)):
            each = contenders[(turn + i) % len(contenders)]
            each.seconds.append(each.update())
    return [each.finish() for each in contenders]


# A contender's process holds these.
_process: dict[str, Any] = {}


def _load(path: str, rank: int) -> None:
    """Load a model as a rank of a run does, in this process."""
    apply_environment()
    from megarl.parallel.worker import RankWorker

    worker = RankWorker(0)
    worker.prepare()
    import torch

    torch.set_num_threads(1)
    settings = actor_settings(rank)
    worker.join(settings.layout, f"file://{tempfile.mkdtemp()}/rendezvous", 60.0)
    spec = RoleSpec(role=Role.ACTOR, model=ModelConfig(path=path, dtype="float32"), settings=settings)
    worker.load(LoadRequest(roles=(spec,), seed=0))
    _process.update(worker=worker, call=_request(read_model_spec(path)))


def _request(spec: ModelSpec) -> tuple[Any, ...]:
    """Return the arguments of an update on random tokens, by GRPO in one micro-batch."""
    from megarl.algos.build import build_algorithm
    from megarl.config.algo import AlgoConfig
    from megarl.types import Row

    rng = np.random.default_rng(0)
    rows = [
        Row(
            uid=str(i),
            sample_index=0,
            token_ids=rng.integers(0, spec.dims.vocab, PROMPT_TOKENS + RESPONSE_TOKENS, dtype=np.int32),
            num_prompt_tokens=PROMPT_TOKENS,
            loss_mask=np.ones(RESPONSE_TOKENS, bool),
        ).with_quantities(advantages=rng.standard_normal(RESPONSE_TOKENS).astype(np.float32))
        for i in range(NUM_ROWS)
    ]
    objective = build_algorithm(AlgoConfig(), max_response_tokens=RESPONSE_TOKENS)
    request = UpdateRequest(
        step=0,
        objective=objective,
        state=objective.initial_state(),
        denominators=objective.denominators(rows),
        temperature=1.0,
        lr=1e-5,
    )
    return rows, [list(range(NUM_ROWS))], request


def _timed_update() -> float:
    start = time.process_time()
    _process["worker"].update(*_process["call"])
    return time.process_time() - start


def _sizes() -> dict[str, int]:
    """Count the bytes of this process's model, of its gradients, and of its optimizer."""
    import torch

    loaded = _process["worker"].roles[Role.ACTOR]
    buffers = [buffer for ddp in loaded.ddp for buffer in (*ddp.buffers, *ddp.expert_parallel_buffers)]
    inner = [each.optimizer for each in getattr(loaded.optimizer, "chained_optimizers", [loaded.optimizer])]
    states = [value for each in inner for state in each.state.values() for value in state.values()]
    return {
        "parameter_bytes": sum(each.nbytes for chunk in loaded.chunks for each in chunk.parameters()),
        "gradient_bytes": sum(buffer.grad_data.nbytes for buffer in buffers),
        "optimizer_bytes": sum(each.nbytes for each in states if isinstance(each, torch.Tensor)),
    }


def plan_bytes(model: str, path: Path, rank: int) -> SyncBytes:
    """Work out from a model's config.json what a sync sends and a trainer holds, in bfloat16."""
    spec, dtype = read_model_spec(path), "bfloat16"
    weights, adapters = (
        DTYPE_BYTES[dtype] * sum(int(np.prod(shape)) for shape in each.expected_tensors().values())
        for each in (spec, adapter_spec(spec, LoraConfig(rank=rank)))
    )
    roles = [
        RoleSpec(role=Role.ACTOR, model=ModelConfig(path=str(path), dtype=dtype), settings=actor_settings(each))  # type: ignore[arg-type]
        for each in (rank, 0)
    ]
    held, full = (sum(plan_shard(role, spec, 0, num_micro_batches=1).resident.values()) for role in roles)
    return SyncBytes(
        model=model,
        rank=rank,
        weight_bytes=weights,
        adapter_bytes=adapters,
        held_bytes=held,
        held_bytes_full=full,
    )


def limits(
    costs: Sequence[UpdateCost], planned: Sequence[SyncBytes], replaced: Sequence[Replacement]
) -> Iterator[LoraLimit]:
    """Yield the limits of what was measured. The tiny model's adapters of rank 32 are a third of it: it has none."""
    full = {each.model: each for each in costs if not each.rank}
    for each in costs:
        if each.rank and each.model != "tiny":
            name, whole = f"{each.model}, rank {each.rank}", full[each.model]
            yield LoraLimit(name=f"{name}: time of an update", got=each.median_s / whole.median_s, at_most=TIME_LIMIT)
            yield LoraLimit(
                name=f"{name}: gradients and optimizer",
                got=each.state_bytes / whole.state_bytes,
                at_most=STATE_LIMIT,
            )
    for plan in planned:
        if (limit := SYNC_LIMITS.get((plan.model, plan.rank))) is not None:
            yield LoraLimit(name=f"{plan.model}, rank {plan.rank}: bytes of a sync", got=plan.ratio, at_most=limit)
    for engine in replaced:
        if engine.model != "tiny":
            yield LoraLimit(
                name=f"{engine.model}, rank {engine.rank}: replacement in an engine",
                got=engine.ms_per_ten_million,
                at_most=REPLACEMENT_LIMIT_MS,
                unit="ms for ten million elements",
            )


def tables(costs: Sequence[UpdateCost], planned: Sequence[SyncBytes], replaced: Sequence[Replacement]) -> list[str]:
    full = {each.model: each for each in costs if not each.rank}
    measured = [
        [
            each.model,
            f"rank {each.rank}" if each.rank else "all weights",
            f"{each.median_s:.3f}",
            f"{each.median_s / full[each.model].median_s:.2f}",
            *(f"{size / _MIB:,.1f}" for size in (each.parameter_bytes, each.gradient_bytes, each.optimizer_bytes)),
            f"{each.state_bytes / full[each.model].state_bytes:.3f}",
        ]
        for each in costs
    ]
    of_plans = [
        [
            each.model,
            f"rank {each.rank}",
            *(f"{size / 1e6:,.1f}" for size in (each.weight_bytes, each.adapter_bytes)),
            f"1/{1 / each.ratio:.0f}",
            *(f"{size / 1e9:,.1f}" for size in (each.held_bytes_full, each.held_bytes)),
        ]
        for each in planned
    ]
    in_engines = [
        [
            each.model,
            f"rank {each.rank}",
            f"{each.num_elements / 1e6:,.2f}",
            f"{each.median_ms:,.1f}",
            f"{each.ms_per_ten_million:,.1f}",
        ]
        for each in replaced
    ]
    headings = [
        ["model", "trained", "update s", "of all", "weights MiB", "gradients MiB", "optimizer MiB", "of all"],
        ["model", "adapters", "sync MB: weights", "adapters", "of all", "trainer GB: weights", "adapters"],
        ["model", "adapters", "million elements", "replaced ms", "ms for ten million"],
    ]
    return [
        *align([headings[0], *measured], left=(0, 1)),
        "",
        *align([headings[1], *of_plans], left=(0, 1)),
        "",
        *align([headings[2], *in_engines], left=(0, 1)),
    ]


def model_directory(model: str, smollm2: Path, scratch: Path) -> Path:
    """Return where a model lies, after making it if it is not there."""
    if model == "smollm2":
        from megarl_lab.recipes.gguf_model import SMOLLM2, make_gguf_model

        if not smollm2.is_dir():
            make_gguf_model(SMOLLM2, smollm2)
        return smollm2
    from megarl_lab.recipes.tiny_model import TinyModelConfig, make_tiny_model

    make_tiny_model(scratch / model, TinyModelConfig(), seed=0)
    return scratch / model


def main() -> None:
    parser = argparse.ArgumentParser(description="Updates and syncs of adapters against those of all weights.")
    parser.add_argument("--out", type=Path, required=True, help="directory for records.json")
    parser.add_argument("--smollm2", type=Path, default=Path("runs/smollm2"), help="SmolLM2's directory")
    parser.add_argument("--models", nargs="+", choices=("smollm2", "tiny"), default=("smollm2", "tiny"))
    parser.add_argument("--ranks", nargs="+", type=int, default=(32, 8))
    parser.add_argument("--turns", type=int, default=5)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    costs, planned, replaced = list[UpdateCost](), list[SyncBytes](), list[Replacement]()
    with tempfile.TemporaryDirectory() as scratch:
        for model in args.models:
            path = model_directory(model, args.smollm2, Path(scratch))
            costs += measure(model, path, args.ranks, args.turns)
            planned += [plan_bytes(model, path, rank) for rank in args.ranks]
            replaced += [replacements(model, path, rank, args.turns) for rank in args.ranks]
    planned += [plan_bytes(PLANNED_CONFIG.name, PLANNED_CONFIG, rank) for rank in args.ranks]
    print("\n".join(tables(costs, planned, replaced)))
    found = list(limits(costs, planned, replaced))
    for each in found:
        print(
            f"{'holds' if each.holds else 'FAILS'}  {each.name}: {each.got:.4f} {each.unit}, at most {each.at_most:.4f}"
        )
    record = {
        "updates": [asdict(each) for each in costs],
        "planned": [asdict(each) for each in planned],
        "replaced": [asdict(each) for each in replaced],
    }
    (args.out / "records.json").write_text(json.dumps(record, indent=1), encoding="utf-8")
    sys.exit(0 if all(each.holds for each in found) else 1)


if __name__ == "__main__":
    main()
