"""A recorded rollout with everything an update reads, run through the workers of a layout."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from safetensors.torch import load_file

from megarl.algos.build import build_algorithm
from megarl.algos.centering import with_head
from megarl.config.algo import AdvantageConfig, AlgoConfig, CorrectionConfig, KLConfig, PolicyLossConfig
from megarl.config.schema import ActorConfig, HeadConfig, LayoutConfig, ModelConfig, MoeConfig, OptimizerConfig
from megarl.data.packing import plan_micro_batches
from megarl.rollout.replay import read_record, write_record
from megarl.train.forward import with_advantages
from megarl.train.served_teacher import comparison_of
from megarl.types import LikelyTokens, Reward, Row, row_from_sample, scored_batch
from megarl.types.messages import UpdateRequest, UpdateResult
from megarl.weights.families import read_model_spec
from megarl.weights.safetensors_map import create_model_files, weight_specs
from tests.helpers import ranks
from tests.helpers.dense_trainer import AdamSettings
from tests.helpers.rank_pool import RankPool
from tests.helpers.rollouts import assert_same_rollout, random_rollout

TEMPERATURE = 0.8
LEARNING_RATES = (2e-4, 1e-4)
ADAM = AdamSettings(betas=(0.9, 0.95), eps=1e-4, weight_decay=0.1, clip_grad_norm=0.5)
# One reward per sample; no group is all equal.
REWARDS = (1.0, 0.0, 0.5, 1.0, 0.0, 0.0, 1.0, 0.0, 1.0, 1.0, 0.0, 0.5)
MICRO_BATCH_TOKENS = 50

ALGORITHMS = {
    "token-mean": AlgoConfig(aggregation="token-mean"),
    "seq-mean-token-mean+entropy": AlgoConfig(aggregation="seq-mean-token-mean", entropy_coef=0.05),
    "token-mean+kl+entropy": AlgoConfig(
        aggregation="token-mean", entropy_coef=0.02, kl=KLConfig(where="loss", estimator="k3", coef=0.2)
    ),
    "gspo": AlgoConfig(
        policy_loss=PolicyLossConfig(name="gspo", clip_low=0.01, clip_high=0.01, dual_clip=None),
        aggregation="seq-mean-token-mean",
    ),
    "gmpo": AlgoConfig(policy_loss=PolicyLossConfig(name="gmpo", dual_clip=None), aggregation="seq-mean-token-mean"),
    "sapo": AlgoConfig(
        policy_loss=PolicyLossConfig(name="sapo", tau_pos=1.5, tau_neg=2.0), aggregation="seq-mean-token-mean"
    ),
    "clip_cov": AlgoConfig(policy_loss=PolicyLossConfig(name="clip_cov", cov_share=0.2, cov_low=0.0, dual_clip=None)),
    "kl_cov": AlgoConfig(policy_loss=PolicyLossConfig(name="kl_cov", cov_share=0.2, cov_kl_coef=0.7)),
    "echo": AlgoConfig(echo_coef=0.3, entropy_coef=0.05),
}
ANCHOR = CorrectionConfig(name="rollout_ratio")
# Weights of whole rows, sums along them, and masks by statistics of all rows; the oracle of unit tests has these too.
OFF_POLICY = {
    "vespo+m2po": AlgoConfig(
        policy_loss=PolicyLossConfig(name="vespo"),
        correction=CorrectionConfig(name="m2po", max_second_moment=0.5),
    ),
    "ctpo+high entropy": AlgoConfig(
        policy_loss=PolicyLossConfig(name="ctpo", clip_low=0.1, clip_high=0.1, ctpo_dual=0.2), high_entropy_share=0.3
    ),
    "centering": AlgoConfig(
        policy_loss=PolicyLossConfig(name="score_centering", center_weight="tis", max_head_error=None)
    ),
    "flowrl": AlgoConfig(
        policy_loss=PolicyLossConfig(name="flowrl", clip_low=0.5, clip_high=0.5, flowrl_beta=1.0),
        aggregation="seq-mean-token-mean",
    ),
    # Beside the policy before the first of both steps.
    "centering exact": AlgoConfig(
        policy_loss=PolicyLossConfig(name="score_centering", center_weight="tis", compared_with="trainer")
    ),
    "dppo exact": AlgoConfig(
        policy_loss=PolicyLossConfig(name="dppo_top_tv", clip_low=0.002, clip_high=0.002, compared_with="trainer")
    ),
}
# These have the same sums; a few layouts show them.
FURTHER = {
    "topr": AlgoConfig(policy_loss=PolicyLossConfig(name="topr"), correction=ANCHOR),
    "bapo": AlgoConfig(policy_loss=PolicyLossConfig(name="bapo", dual_clip=1.5), correction=ANCHOR),
    "drpo": AlgoConfig(policy_loss=PolicyLossConfig(name="drpo", drpo_delta=0.01), correction=ANCHOR),
    "dppo_tv+otb": AlgoConfig(
        policy_loss=PolicyLossConfig(name="dppo_tv", clip_low=0.001, clip_high=0.001),
        advantage=AdvantageConfig(estimator="otb"),
        correction=ANCHOR,
    ),
    "luspo": AlgoConfig(
        policy_loss=PolicyLossConfig(name="gspo", clip_low=0.01, clip_high=0.01, dual_clip=None),
        aggregation="seq-mean-token-sum",
    ),
}
HEAD_TOKENS = 4
OFF_POLICY |= FURTHER
ALGORITHMS |= OFF_POLICY
# Ties change which gradients meet in the embedding.
TIED = {name: name != "seq-mean-token-mean+entropy" for name in ALGORITHMS}


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One optimizer step: metrics of the mini-batch, log-probs before it by row, weights after it."""

    metrics: dict[str, float]
    logprobs: list[np.ndarray]
    weights: dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Two steps in one layout, and what forward passes of actor and reference said before them."""

    steps: list[Step]
    forward_logprobs: list[np.ndarray]
    ref_logprobs: list[np.ndarray]


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """A rollout with everything an update reads."""

    name: str
    path: Path
    rows: list[Row]

    @property
    def cfg(self) -> AlgoConfig:
        return ALGORITHMS[self.name]

    @property
    def mean_abs_advantage(self) -> float:
        return float(np.abs(np.concatenate([row.quantities["advantages"][row.loss_mask] for row in self.rows])).mean())


def make_replay(name: str, path: Path, record: Path, pool: RankPool) -> Replay:
    """Record and read a rollout; then old log-probs, a reference and advantages for its rows."""
    rollout = random_rollout()
    write_record(record, rollout)
    replayed = read_record(record)
    assert_same_rollout(replayed, rollout)
    rows = [row_from_sample(sample) for sample in replayed.samples]
    model = ModelConfig(path=str(path), dtype="float32")
    everything = [list(range(len(rows)))]
    found = pool.run(ranks.forward_actor, ActorConfig(), model, rows, everything, temperature=TEMPERATURE)[0]
    logprobs, entropy = found.quantities["logprobs"], found.quantities["entropy"]

    rng = np.random.default_rng(7)

    def noisy(i: int, scale: float) -> np.ndarray:
        noise = rng.normal(0, scale, len(logprobs[i])).astype(np.float32)
        return np.where(rows[i].loss_mask, logprobs[i] + noise, np.float32(0))

    rows = [row.with_quantities(old_logprobs=noisy(i, 0.3), ref_logprobs=noisy(i, 0.2)) for i, row in enumerate(rows)]
    if name in OFF_POLICY:
        # Samples a little away from the policy, so that statistics part them.
        extra = [
            {"rollout_logprobs": noisy(i, 0.6), "old_entropy": entropy[i], "old_squares": np.exp(-entropy[i])}
            for i in range(len(rows))
        ]
        rows = [row.with_quantities(**values) for row, values in zip(rows, extra, strict=True)]
    if name == "centering":
        top = pool.run(
            ranks.forward_actor, ActorConfig(), model, rows, everything, temperature=TEMPERATURE, top_k=HEAD_TOKENS
        )[0].quantities
        rows = [
            with_head(
                replace(row, likely=engine_head(row, top["top_ids"][i], top["top_logprobs"][i], rng)),
                keeps_sampled=False,
            )
            for i, row in enumerate(rows)
        ]
    if ALGORITHMS[name].echo_coef:
        # The second of three tokens of a reply is the template's.
        said = [~row.loss_mask & (np.arange(row.num_response_tokens) % 3 != 1) for row in rows]
        rows = [row.with_quantities(observed=mask.astype(np.float32)) for row, mask in zip(rows, said, strict=True)]
    algorithm = build_algorithm(ALGORITHMS[name], max_response_tokens=64)
    rewards = [Reward(score=score, correct=score == 1.0) for score in REWARDS]
    advantages = algorithm.advantages(scored_batch(rows, rewards), algorithm.initial_state())
    return Replay(name=name, path=path, rows=with_advantages(rows, advantages))


def engine_head(row: Row, ids: np.ndarray, logprobs: np.ndarray, rng: np.random.Generator) -> LikelyTokens:
    """The policy's likeliest tokens, of about the same probabilities; no sampled token is recorded beside them."""
    noise = rng.normal(0, 0.3, logprobs.shape)
    nearby = logprobs + noise - np.abs(noise).max(1, keepdims=True)
    ids, nearby = (np.pad(values, ((0, 0), (0, 1)), constant_values=-1) for values in (ids.astype(np.int32), nearby))
    return LikelyTokens(ids=np.where(row.loss_mask[:, None], ids, -1), logprobs=nearby.astype(np.float32))


def run_replay(
    replay: Replay, pool: RankPool, actor: ActorConfig, plan: Sequence[Sequence[Sequence[int]]], directory: Path
) -> Run:
    """Two updates through the workers of a layout."""
    algorithm = build_algorithm(replay.cfg, max_response_tokens=64)
    requests = [
        UpdateRequest(
            step=step,
            objective=algorithm,
            state=algorithm.initial_state(),
            denominators=algorithm.denominators(replay.rows),
            temperature=TEMPERATURE,
            lr=lr,
            teaching=comparison_of(replay.cfg, (), None),
        )
        for step, lr in enumerate(LEARNING_RATES)
    ]
    specs = weight_specs(read_model_spec(replay.path), "float32")
    files = [create_model_files(directory / str(step), specs) for step in range(len(requests))]
    case = ranks.UpdateCase(
        actor=actor,
        model=ModelConfig(path=str(replay.path), dtype="float32"),
        rows=replay.rows,
        micro_batches=plan,
        requests=requests,
        files=[[str(file) for file in names] for names in files],
    )
    outcomes = [outcome for outcome in pool.run(ranks.run_updates, case) if outcome.actor is not None]
    assert len(outcomes) == actor.layout.dp
    num_rows = len(replay.rows)
    steps = []
    for step, (file,) in enumerate(files):
        results: list[UpdateResult] = [outcome.updates[step] for outcome in outcomes]
        # Every replica reports the metrics of all of them.
        assert all(result.metrics == results[0].metrics for result in results)
        logprobs = merge([result.before for result in results], num_rows)
        steps.append(Step(metrics=dict(results[0].metrics), logprobs=logprobs, weights=load_file(file)))
    old, reference = (
        merge([getattr(outcome, role).quantities["logprobs"] for outcome in outcomes], num_rows)
        for role in ("actor", "reference")
    )
    return Run(steps=steps, forward_logprobs=old, ref_logprobs=reference)


def merge(parts: Sequence[Mapping[int, np.ndarray]], num_rows: int) -> list[np.ndarray]:
    """Rows in order from replicas, each of which has its own."""
    indices = sorted(i for part in parts for i in part)
    assert indices == list(range(num_rows))
    together = {i: value for part in parts for i, value in part.items()}
    return [together[i] for i in range(num_rows)]


def one_batch(rows: Sequence[Row]) -> list[list[list[int]]]:
    return [[list(range(len(rows)))]]


def row_by_row(rows: Sequence[Row]) -> list[list[list[int]]]:
    return [[[i] for i in range(len(rows))]]


def alone(dp: int) -> Callable[[Sequence[Row]], list[list[list[int]]]]:
    """The last rank has all rows; the others have as many micro-batches, without rows."""

    def plan(rows: Sequence[Row]) -> list[list[list[int]]]:
        nothing: list[list[int]] = [[] for _ in rows]
        return [nothing] * (dp - 1) + row_by_row(rows)

    return plan


def planned(dp: int, multiple: int = 1) -> Callable[[Sequence[Row]], list[list[list[int]]]]:
    """As the trainer plans them."""
    return lambda rows: plan_micro_batches([row.num_tokens for row in rows], dp, MICRO_BATCH_TOKENS, multiple=multiple)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A layout and a split."""

    layout: LayoutConfig
    plan: Callable[[Sequence[Row]], list[list[list[int]]]]
    distributed: bool = True
    recompute: Literal["none", "selective", "full"] = "none"
    moe: MoeConfig = field(default_factory=MoeConfig)

    @property
    def actor(self) -> ActorConfig:
        return ActorConfig(
            layout=self.layout,
            moe=self.moe,
            recompute=self.recompute,
            head=HeadConfig(chunk_tokens=16),
            optimizer=OptimizerConfig(
                betas=ADAM.betas,
                eps=ADAM.eps,
                weight_decay=ADAM.weight_decay,
                clip_grad_norm=ADAM.clip_grad_norm,
                distributed=self.distributed,
            ),
        )
