"""Run in a process of its own (`RankPool`): rounds of the canary on live engines, in whose syncs something goes wrong.

A fault is armed in an engine's process, goes off in the next sync, and is gone afterwards.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from megarl.cluster.cluster import Cluster
from megarl.cluster.processes import wait_all
from megarl.cluster.roles import actor_role
from megarl.errors import MismatchError, WeightSyncError
from megarl.rollout import worker_extension
from megarl.rollout.engine import VllmEngine
from megarl.train.canary import Canary
from megarl.train.passes import RolePasses
from megarl.types import row_from_sample
from megarl.weights.boxes import slices_of
from tests.e2e.support import open_policy, random_prompts, random_sequences, small_config
from tests.helpers.rank_pool import RankContext

# The gate's for float32.
LIMIT = 1e-4
MATRIX = "model.layers.1.mlp.down_proj.weight"
SEEN_S = 30.0


def _drop(worker: Any, name: str, tensor: torch.Tensor) -> None:
    """Half of a matrix does not arrive."""
    if name == MATRIX:
        tensor[: len(tensor) // 2] = 0


def _scale(worker: Any, name: str, tensor: torch.Tensor) -> None:
    if name == MATRIX:
        tensor *= 2


def _flip(bit: int, tensor: torch.Tensor) -> None:
    tensor.view(torch.int32)[3, 5] ^= 1 << bit


def _high_bit(worker: Any, name: str, tensor: torch.Tensor) -> None:
    if name == MATRIX:
        _flip(30, tensor)


def _low_bit(worker: Any, name: str, tensor: torch.Tensor) -> None:
    if name == MATRIX:
        _flip(0, tensor)


def _swap(worker: Any, name: str, tensor: torch.Tensor) -> None:
    """Two workers get each other's part."""
    if name != MATRIX:
        return
    (box,), directory = worker.bridge._share.needs[name], Path(worker.swapped_at)
    own, other = (directory / f"{rank}.pt" for rank in (worker.rank, 1 - worker.rank))
    torch.save(tensor[slices_of(box)].clone(), partial := own.with_suffix(".partial"))
    partial.rename(own)
    until = time.monotonic() + SEEN_S
    while not other.exists():
        assert time.monotonic() < until
        time.sleep(0.01)
    tensor[slices_of(box)] = torch.load(other)


SPOILERS: Mapping[str, Callable[[Any, str, torch.Tensor], None]] = {
    "dropped slice": _drop,
    "wrong scale": _scale,
    "high bit": _high_bit,
    "low bit": _low_bit,
    "swapped ranks": _swap,
}


def _arm_worker(worker: Any, fault: str, directory: str) -> None:
    """In a worker: spoil what comes in the next transfer."""
    # Not what vLLM wraps it in.
    worker = worker.load_bridge.__self__
    worker.swapped_at = directory
    if fault == "left behind":
        load = worker._load

        def ignore(source: Iterator[tuple[str, torch.Tensor]], tower: object = None) -> str:
            worker._load = load
            for _ in source:
                pass
            return ""

        worker._load = ignore
    elif fault == "last adapter":
        replace_adapters = worker_extension.replace_adapters

        def keep(*_: object) -> str:
            worker_extension.replace_adapters = replace_adapters
            return ""

        worker_extension.replace_adapters = keep
    else:
        receive, spoil = worker.bridge.receive, SPOILERS[fault]

        def spoiled(transfer: int, *, fill: float | None = None) -> Iterator[tuple[str, torch.Tensor]]:
            worker.bridge.receive = receive
            for name, tensor in receive(transfer, fill=fill):
                spoil(worker, name, tensor)
                yield name, tensor

        worker.bridge.receive = spoiled


def arm(engine: VllmEngine, fault: str, directory: str) -> None:
    """In an engine's process."""
    if fault in ("stale cache", "older claim"):
        name = {"stale cache": "reset_prefix_cache", "older claim": "update_weight_version"}[fault]
        kept = getattr(engine.llm, name)

        def skip(*_: object, **__: object) -> bool:
            setattr(engine.llm, name, kept)
            return True

        setattr(engine.llm, name, skip)
    elif fault != "none":
        engine.llm.collective_rpc(_arm_worker, args=(fault, directory))


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """What a round of the canary said: metrics, or an error."""

    fault: str
    metrics: Mapping[str, float]
    error: str


def run(
    _: RankContext, model: str, settings: Sequence[str], faults: Sequence[str], engine: int, directory: str
) -> list[Round]:
    """A step and a sync for each fault, of one of the engines, and a round of the canary around it.

    A fault `verified X` is X in a sync with sync.verify.
    """
    config = small_config(Path(model), "actor.optimizer.lr=0.003", *settings)
    # Longer than a block of 32 tokens, and alike in their first two.
    shared = random_sequences(1, 64)[0]
    rounds = []
    with Cluster(config) as cluster:
        policy = open_policy(cluster, config)
        passes = RolePasses(cluster.workers, actor_role(config), temperature=1.0)
        canary = Canary(
            every=1,
            limit=LIMIT,
            room=config.data.max_prompt_tokens + config.rollout.max_response_tokens,
            temperature=1.0,
            engines=cluster.engines,
            passes=passes,
            enter=lambda _: None,
            resend=lambda version: policy.sync.push(version, verify=True),
            holds=True,
            file=Path(directory) / "canary.json",
        )
        policy.sync.push(0, verify=False)
        for version, given in enumerate(faults, start=1):
            fault, verified = given.removeprefix("verified "), given.startswith("verified ")
            prompts = [replace(p, token_ids=(*shared, *p.token_ids)) for p in random_prompts([12] * 8, seed=version)]
            rows = [row_from_sample(sample) for sample in policy.rollout(prompts, step=version).samples]
            canary.prime(version, prompts)
            policy.update(rows, step=version)
            armed = cluster.engines.processes[engine].call(arm, fault, directory)
            wait_all([armed], timeout_s=60, doing="arming a fault")
            error, metrics = "", dict[str, float]()
            try:
                policy.sync.push(version, verify=verified)
                canary.ask(version)
                metrics = canary.check(version, step=version + 1)
            except (MismatchError, WeightSyncError) as raised:
                error = f"{type(raised).__name__}: {raised}"
            rounds.append(Round(fault=given, metrics=metrics, error=error))
        policy.sync.close()
    return rounds
