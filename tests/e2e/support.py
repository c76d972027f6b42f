"""Configurations, policies and rollouts for tests on a live cluster."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest

from megarl.algos.build import algorithm_of
from megarl.cluster.bridge import BridgeSync
from megarl.cluster.cluster import Cluster
from megarl.cluster.engines import EngineGroup
from megarl.cluster.remotes import Process
from megarl.cluster.roles import actor_role
from megarl.cluster.sync_plan import sent_spec
from megarl.config import load_config
from megarl.config.generation import Sampling
from megarl.config.schema import Config
from megarl.host import loop
from megarl.rollout.engine import Completion, GenerationRequest
from megarl.rollout.source import Doing, Group, SamplingPlan, collect, generating
from megarl.rollout.vllm_source import VllmSource
from megarl.train.passes import RolePasses, RoleUpdater
from megarl.types import FloatArray, Prompt, RolloutBatch, Row, Sample
from megarl.types.messages import LoadRequest
from megarl.weights.families import ModelSpec, read_model_spec
from megarl.weights.safetensors_map import TensorSpec, weight_specs
from tests.helpers.checkpoints import VOCAB_SIZE
from tests.helpers.loops import begin_groups

REPOSITORY = Path(__file__).parents[2]
RUN_FILE = REPOSITORY / "configs" / "run" / "sums-rl.yaml"
SFT_FILE = REPOSITORY / "configs" / "run" / "sums-sft.yaml"
# Two tensor-parallel ranks with sequence parallelism and one engine.
TP2 = ("actor.layout={tp: 2, dp: 1, sequence_parallel: true}", "rollout.engine.num_engines=1")
SMALL = (
    *TP2,
    "data.max_prompt_tokens=128",
    "rollout.max_response_tokens=64",
    "rollout.engine.max_num_seqs=64",
    "actor.optimizer.warmup_steps=0",
    "logging.tensorboard=false",
)

# Which model, and so which cluster, a test wants. Tied comes first in both: pytest groups tests by this index.
tied_head = pytest.mark.parametrize("model", [True], ids=["tied"], indirect=True)
# A model of its own starts a cluster of its own.
both_heads = pytest.mark.parametrize(
    "model",
    [pytest.param(True, id="tied"), pytest.param(False, id="untied", marks=pytest.mark.long)],
    indirect=True,
)


def small_config(model: Path, *overrides: str) -> Config:
    """The reinforcement-learning run of configs/, small, on a model."""
    return load_config(RUN_FILE, [*SMALL, f"model.path={model}", *overrides])


def random_prompts(lengths: Sequence[int], *, seed: int = 0) -> list[Prompt]:
    """Prompts of random tokens."""
    rng = np.random.default_rng(seed)
    return [
        Prompt(
            uid=f"p{i}",
            token_ids=tuple(rng.integers(3, VOCAB_SIZE, n).tolist()),
            data_source="megarl/sums",
            ground_truth="1",
        )
        for i, n in enumerate(lengths)
    ]


def random_sequences(num: int, length: int, *, seed: int = 0) -> list[list[int]]:
    """Sequences of random tokens."""
    rng = np.random.default_rng(seed)
    return [rng.integers(3, VOCAB_SIZE, length).tolist() for _ in range(num)]


def rows_of(sequences: Sequence[Sequence[int]]) -> list[Row]:
    """Rows that score every token but the first, as an engine's prompt log-probs do."""
    return [
        Row(
            uid=f"s{i}",
            sample_index=0,
            token_ids=np.asarray(tokens, dtype=np.int64),
            num_prompt_tokens=1,
            loss_mask=np.ones(len(tokens) - 1, dtype=np.bool_),
        )
        for i, tokens in enumerate(sequences)
    ]


@dataclass(frozen=True, slots=True)
class UnattendedEngines:
    """The engines of a cluster without a supervisor: if one dies, nobody replaces it."""

    group: EngineGroup

    def generate(self, request: GenerationRequest) -> "asyncio.Future[Completion]":
        return self.group.generate(request)

    def wait(self, work: "asyncio.Future[None]", *, timeout_s: float, doing: Doing) -> None:
        loop.wait(self.group.attend(work, timeout_s=timeout_s, doing=doing))
        work.result()

    def parts(self) -> "dict[asyncio.Future[Completion], Completion]":
        return self.group.parts()


@dataclass(slots=True)
class First:
    """Takes samples as a judging does, and tells when the first has come."""

    come: asyncio.Event = field(default_factory=asyncio.Event)

    def add(self, prompt: Prompt, sample: Sample) -> None:
        self.come.set()

    async def wait(self) -> None:
        await self.come.wait()


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """A freshly loaded policy on a cluster, with its updater and its weight sync (nothing pushed yet)."""

    cluster: Cluster
    config: Config
    spec: ModelSpec
    specs: dict[str, TensorSpec]
    sync: BridgeSync
    updater: RoleUpdater

    def rollout(
        self,
        prompts: Sequence[Prompt],
        *,
        num_samples: int = 4,
        temperature: float = 1.0,
        max_tokens: int = 32,
        step: int = 1,
        at_first: Callable[[VllmSource, Sequence[Group]], object] | None = None,
    ) -> RolloutBatch:
        """Samples of the engine. at_first: called when the first of them has finished."""
        plan = SamplingPlan(
            step=step,
            num_samples=num_samples,
            sampling=Sampling(temperature=temperature),
            max_response_tokens=max_tokens,
            run_seed=0,
        )
        engines, first = UnattendedEngines(self.cluster.engines), First()
        source = VllmSource(engines)
        groups = begin_groups(source, prompts, plan, judging=first)
        if at_first is not None:
            engines.wait(loop.spawn(first.wait()), timeout_s=60.0, doing=generating)
            at_first(source, groups)
        return collect(engines.wait, groups, timeout_s=60.0)

    def logprobs(self, rows: Sequence[Row], *, temperature: float = 1.0) -> list[FloatArray]:
        """The trainer's log-probs."""
        passes = RolePasses(self.cluster.workers, actor_role(self.config), temperature=temperature)
        return passes.forward(rows, step=0)["logprobs"]

    def update(self, rows: Sequence[Row], *, step: int) -> None:
        """A GRPO update that makes every other row likelier and the rest less likely."""
        old = self.logprobs(rows)
        judged = [
            row.with_quantities(
                old_logprobs=old[i], advantages=np.full(row.num_response_tokens, 1 - 2 * (i % 2), dtype=np.float32)
            )
            for i, row in enumerate(rows)
        ]
        algorithm = algorithm_of(self.config)
        self.updater.update(judged, algorithm.initial_state(), step=step)


def open_policy(cluster: Cluster, config: Config) -> Policy:
    """Load the configuration's model into the cluster's ranks, and open a bridge to its engines."""
    actor = actor_role(config)
    cluster.workers.load(LoadRequest(roles=(actor,), seed=0))
    spec = read_model_spec(config.model.path)
    algorithm = algorithm_of(config)
    specs = weight_specs(sent_spec(config.actor.lora, spec), config.model.dtype, by_expert=True)
    return Policy(
        cluster=cluster,
        config=config,
        spec=spec,
        specs=specs,
        sync=cluster.weight_sync(specs),
        updater=RoleUpdater(cluster.workers, actor, algorithm, total_steps=1000),
    )


def move_apart(cluster: Cluster) -> None:
    """Let every process be on a host of its own, as far as the driver knows: they share no memory."""

    def moved(process: Process) -> Process:
        there = replace(process, location=replace(process.location, host=process.name))
        process.roster.enter(there)
        return there

    for group in (*cluster.workers.groups, cluster.engines):
        group.processes[:] = map(moved, group.processes)


def largest_difference(a: Sequence[FloatArray], b: Sequence[FloatArray]) -> float:
    """max |a − b| over all tokens of all sequences, which must have equal lengths; NaN if anything is."""
    return float(np.abs(np.concatenate(list(a)) - np.concatenate(list(b))).max())


def mean_difference(a: Sequence[FloatArray], b: Sequence[FloatArray]) -> float:
    """mean |a − b| over all tokens of all sequences, which must have equal lengths."""
    return float(np.abs(np.concatenate(list(a)) - np.concatenate(list(b))).mean())
