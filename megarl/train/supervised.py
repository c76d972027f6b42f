"""Train on fixed data: the loop of `megarl sft`, `train-reward` and `train-preference`, and their tasks."""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import torch

from megarl.algos.objectives import SftAlgorithm
from megarl.algos.preference import BATCH_KL, BradleyTerry, PreferenceObjective, preference_objective
from megarl.cluster.roles import actor_role, reference_role, reward_role, teacher_roles
from megarl.config.schema import role_settings
from megarl.data.demonstrations import SftDataset
from megarl.data.preferences import PreferenceDataset, ResponsePairDataset, mismatched_rows
from megarl.data.sampler import PromptSampler
from megarl.host.activity import doing
from megarl.host.signals import stop_on_signals
from megarl.record.checkpoints import Checkpoint, CheckpointManager, Command, RunState
from megarl.record.metrics import MetricsLogger, Timers
from megarl.record.progress import Progress, ProgressValues
from megarl.record.recorder import RunRecorder
from megarl.train.export import export_role
from megarl.train.forward import with_likely_tokens, with_quantities
from megarl.train.passes import CountedObjective, RolePasses, RoleUpdater
from megarl.train.served_teacher import teaching_of
from megarl.train.supervised_inputs import Examples, SupervisedInputs
from megarl.train.validate import Validation
from megarl.types import AlgoState, FloatArray, PolicyOutputs, Row, TokenQuantity, pad_rows, row_batch
from megarl.types.messages import LoadRequest, Role, RoleSpec, Teaching
from megarl.types.rows import MARGIN
from megarl.weights.families import read_model_spec

if TYPE_CHECKING:
    from megarl.cluster.cluster import Cluster


PassesByRole: TypeAlias = Mapping[Role, RolePasses]


@dataclass(frozen=True, slots=True, kw_only=True)
class SupervisedTask:
    """The model that a supervised run trains, and its data.

    rows: returns the rows of the examples with these indices. validate: called before the first step, every
    `validate_every` steps and after the last. frozen: roles that are loaded besides the trained one. add_quantities:
    adds the quantities that the objective reads to the rows of a step. teaching: how updates compare the model with a
    teacher.
    """

    command: Command
    role: RoleSpec
    objective: CountedObjective
    total_steps: int
    batch_size: int
    num_examples: int
    rows: Callable[[Sequence[int]], list[Row]]
    validate: Callable[[PassesByRole, int], Validation] | None = None
    validate_every: int = 1
    frozen: tuple[RoleSpec, ...] = ()
    add_quantities: Callable[[PassesByRole, list[Row], int], list[Row]] | None = None
    teaching: Teaching | None = None


class SupervisedTrainer:
    """The trainer of one supervised run on a cluster."""

    def __init__(
        self, task: SupervisedTask, inputs: SupervisedInputs[Examples], cluster: "Cluster", recorder: RunRecorder
    ) -> None:
        self.task, self.config, self.cluster, self.recorder = task, (config := inputs.config), cluster, recorder
        self.state, self.timers = AlgoState(), Timers()
        dims = read_model_spec(task.role.model.path).dims
        self.updater = RoleUpdater(
            cluster.workers,
            task.role,
            task.objective,
            total_steps=task.total_steps,
            dims=dims,
            teaching=task.teaching,
            is_taught=task.teaching is not None,
        )
        top_k = config.algo.distill.asked_top_k if task.teaching is not None else None
        self.passes: PassesByRole = {
            task.role.role: self.updater,
            **{
                role.role: RolePasses(
                    cluster.workers,
                    role,
                    dims=read_model_spec(role.model.path).dims,
                    top_k=top_k,
                    common=None if task.teaching is None else task.teaching.common,
                )
                for role in task.frozen
            },
        }
        self.sampler = PromptSampler(task.num_examples, task.batch_size, config.run.seed, config.data.shuffle)
        self.checkpoints = CheckpointManager(
            recorder.paths.checkpoints, config.checkpoint, cluster.workers, [task.role], recorder.require_owned
        )

    def fit(self, checkpoint: Checkpoint | None = None) -> None:
        """Train up to the last step, then export the model.

        checkpoint: where to continue from; None starts at step 0.

        Raises:
            RunStopped: a signal ended the run early; its checkpoint is complete.
        """
        task, run = self.task, self.config.run
        roles = (task.role, *task.frozen)
        self.cluster.workers.load(LoadRequest.of(run, roles))
        start = 0
        if checkpoint:
            same = checkpoint.same_layout(role_settings(self.config))
            self.cluster.workers.load_checkpoint(checkpoint.path, same_layout=same)
            self.sampler.load_state_dict(checkpoint.state.sampler)
            self.updater.num_optimizer_steps = checkpoint.state.num_optimizer_steps
            start = checkpoint.state.step
        with (
            self.recorder.metrics() as log,
            Progress(total=task.total_steps, initial=start, description=run.name) as progress,
            stop_on_signals() as stop,
        ):
            # A signal may have kept the validation of the checkpoint's step.
            if checkpoint is None or checkpoint.state.score is None:
                self.checkpoints.add_score(start, self._validate(start, log, progress))
            for step in range(start + 1, task.total_steps + 1):
                with doing(f"step {step}"):
                    self._train_step(step, log, progress)
                is_stopping = stop.signum is not None and step < task.total_steps
                score = None if is_stopping else self._validate(step, log, progress)
                state = partial(self._run_state, step, score)
                self.checkpoints.after_step(
                    step, total=task.total_steps, stop=stop, state=state, is_validated=score is not None
                )
        self.recorder.require_owned()
        export_role(self.cluster.workers, task.role, self.recorder.paths.export)

    def _run_state(self, step: int, score: float | None, directory: Path) -> RunState:
        return RunState(
            command=self.task.command,
            step=step,
            num_optimizer_steps=self.updater.num_optimizer_steps,
            sampler=self.sampler.state_dict(),
            algo=self.state,
            source={},
            score=score,
            config=self.config,
            inputs=self.recorder.inputs.to_json(),
        )

    def _train_step(self, step: int, log: MetricsLogger, progress: Progress) -> None:
        role = self.task.role.role
        rows = self.task.rows(self.sampler.next_batch())
        with self.timers("step"):
            if self.task.add_quantities is not None:
                with self.timers("score"):
                    rows = self.task.add_quantities(self.passes, rows, step)
            with self.timers(f"update_{role}"):
                result = self.updater.update(rows, self.state, step=step, with_outputs=False)
        times = self.timers.pop()
        tokens_per_s = sum(row.num_tokens for row in rows) / times["timing_s/step"]
        epoch = step * self.task.batch_size / self.task.num_examples
        metrics = {**result.metrics} | times | {"perf/tokens_per_s": tokens_per_s, "progress/epoch": epoch}
        log.log(step, metrics | self.cluster.metrics(step))
        progress.update(
            step,
            ProgressValues(
                loss=metrics[f"{role}/loss"],
                accuracy=metrics.get(f"{role}/accuracy", metrics.get("preference/accuracy")),
                tokens_per_s=tokens_per_s,
            ),
        )

    def _validate(self, step: int, log: MetricsLogger, progress: Progress) -> float | None:
        """Validate if it is due, and return the score; None if it is not."""
        due = step % self.task.validate_every == 0 or step == self.task.total_steps
        if self.task.validate is None or not due:
            return None
        with self.timers("testing"):
            result = self.task.validate(self.passes, step)
        log.log(step, {**result.metrics} | self.timers.pop())
        progress.note(f"step {step}: {result.summary}")
        return result.score


def sft_task(inputs: SupervisedInputs[SftDataset]) -> SupervisedTask:
    """Make the task that trains up to step `sft.total_steps`, on `sft.batch_size` rows a step."""
    config, val = inputs.config, inputs.val
    return SupervisedTask(
        command="sft",
        role=actor_role(config),
        frozen=(frozen := tuple(teacher_roles(config))),
        teaching=teaching_of(config.algo.distill, frozen, inputs.common_tokens),
        # The tokens that the only teacher finds likeliest.
        add_quantities=None
        if config.algo.distill.asked_top_k is None
        else lambda passes, rows, step: with_likely_tokens(rows, passes[Role.TEACHER].forward(rows, step=step)),
        objective=SftAlgorithm(distill=config.algo.distill),
        total_steps=config.sft.total_steps,
        batch_size=config.sft.batch_size,
        num_examples=len(inputs.train),
        rows=inputs.train.rows,
        validate=None if val is None else lambda passes, step: validate_sft(val, passes[Role.ACTOR], step=step),
        validate_every=config.sft.val_every_steps,
    )


def validate_sft(data: SftDataset, passes: RolePasses, *, step: int) -> Validation:
    """Measure the cross-entropy per trained token of held-out rows, and its exponential, the perplexity.

    Every row counts once, whatever the layout. The score is the negative cross-entropy, so that more is better.
    """
    rows = data.rows(range(len(data)))
    logprobs = passes.forward(rows, step=step)["logprobs"]
    num_tokens = sum(int(row.loss_mask.sum()) for row in rows)
    total = sum(float(values[row.loss_mask].sum(dtype=np.float64)) for row, values in zip(rows, logprobs, strict=True))
    nll = -total / num_tokens
    metrics = {"nll": nll, "perplexity": math.exp(nll), "num_rows": len(rows), "num_tokens": num_tokens}
    return Validation(
        metrics={f"val/sft/{name}": float(value) for name, value in metrics.items()},
        score=-nll,
        summary=f"validation on {len(rows)} rows: {nll:.4f} nats per token, perplexity {math.exp(nll):.3f}",
    )


def train_reward_task(inputs: SupervisedInputs[PreferenceDataset]) -> SupervisedTask:
    """Make the task that trains up to step `train_reward.total_steps`, on `train_reward.batch_size` pairs a step."""
    settings, val = inputs.config.train_reward, inputs.val
    return SupervisedTask(
        command="train-reward",
        role=reward_role(inputs.config),
        objective=BradleyTerry(),
        total_steps=settings.total_steps,
        batch_size=settings.batch_size,
        num_examples=len(inputs.train),
        rows=inputs.train.rows,
        validate=None if val is None else lambda passes, step: validate_pairs(val, passes[Role.REWARD], step=step),
        validate_every=settings.val_every_steps,
    )


def validate_pairs(data: PreferenceDataset, passes: RolePasses, *, step: int) -> Validation:
    """Measure accuracy, loss and mean difference over held-out pairs; the score is the accuracy."""
    rows = data.rows(range(len(data)))
    scores = np.concatenate(passes.forward(rows, step=step)["values"])
    margins = np.concatenate([row.quantities[MARGIN] for row in rows[: len(data)]])
    metrics = pair_metrics(scores[: len(data)], scores[len(data) :], margins)
    named = {f"val/reward_model/{name}": value for name, value in metrics.items()}
    return Validation(
        metrics={**named, "val/reward_model/num_pairs": len(data)},
        score=metrics["accuracy"],
        summary=f"validation on {len(data)} pairs: accuracy {metrics['accuracy']:.3f}, loss {metrics['loss']:.3f}",
    )


def pair_metrics(chosen: FloatArray, rejected: FloatArray, margins: FloatArray) -> dict[str, float]:
    """Compute the means over pairs of `BradleyTerry`: share in the right order, difference of scores, loss."""
    difference = chosen.astype(np.float64) - rejected
    return {
        "accuracy": float((difference > 0).mean()),
        "margin": float(difference.mean()),
        # log(1 + exp(x)) that does not overflow.
        "loss": float(np.logaddexp(0.0, margins - difference).mean()),
    }


def train_preference_task(inputs: SupervisedInputs[ResponsePairDataset]) -> SupervisedTask:
    """Make the task that trains up to `train_preference.total_steps`, `train_preference.batch_size` pairs a step."""
    config, settings, val = inputs.config, inputs.config.train_preference, inputs.val
    objective = preference_objective(settings)
    return SupervisedTask(
        command="train-preference",
        role=actor_role(config),
        objective=objective,
        total_steps=settings.total_steps,
        batch_size=settings.batch_size,
        num_examples=len(inputs.train),
        rows=inputs.train.rows,
        validate=None if val is None else lambda passes, step: validate_preferences(val, objective, passes, step=step),
        validate_every=settings.val_every_steps,
        frozen=(reference_role(config),) if TokenQuantity.REF_LOGPROBS in objective.reads else (),
        add_quantities=lambda passes, rows, step: with_pair_quantities(rows, objective.reads, passes, step=step),
    )


def with_pair_quantities(rows: list[Row], reads: Collection[str], passes: PassesByRole, *, step: int) -> list[Row]:
    """Return a batch's rows with those quantities of `reads` that need models: reference log-probs, and KTO's batch KL.

    The KL is estimated with the policy as it is before the step, over the whole batch: it has no gradient, and does not
    depend on how the rows are split over ranks and micro-batches.
    """
    if TokenQuantity.REF_LOGPROBS not in reads:
        return rows
    others = mismatched_rows(rows) if BATCH_KL in reads else []
    reference = passes[Role.REFERENCE].forward([*rows, *others], step=step)["logprobs"]
    rows = with_quantities(rows, {TokenQuantity.REF_LOGPROBS: reference[: len(rows)]})
    if not others:
        return rows
    policy = passes[Role.ACTOR].forward(others, step=step)["logprobs"]
    ratios = [(p.astype(np.float64) - r).sum() for p, r in zip(policy, reference[len(rows) :], strict=True)]
    kl = max(float(np.mean(ratios)), 0.0)
    return with_quantities(rows, {BATCH_KL: [np.full(row.num_response_tokens, kl, np.float32) for row in rows]})


def validate_preferences(
    data: ResponsePairDataset, objective: PreferenceObjective, passes: PassesByRole, *, step: int
) -> Validation:
    """Measure the loss and its metrics over held-out pairs; the score is the accuracy.

    KTO's KL is estimated once over all pairs, so that no number depends on how they divide into batches.
    """
    rows = with_pair_quantities(data.rows(range(len(data))), objective.reads, passes, step=step)
    logprobs = passes[Role.ACTOR].forward(rows, step=step)["logprobs"]
    sums: dict[str, float] = {}
    # In parts, because rows are padded to the longest of a part.
    for start in range(0, len(data), objective.cfg.batch_size):
        pairs = range(start, min(start + objective.cfg.batch_size, len(data)))
        both = [*pairs, *(len(data) + i for i in pairs)]
        padded = pad_rows([logprobs[i] for i in both], dtype=torch.float32)
        batch = row_batch([rows[i] for i in both], device=padded.device)
        parts = objective.loss(batch, PolicyOutputs(logprobs=padded, entropy=None), AlgoState())
        for name, value in parts.shares({"pairs": float(len(data))}).items():
            sums[name] = sums.get(name, 0.0) + value
    accuracy, loss = sums["preference/accuracy"], sums["preference/loss"]
    return Validation(
        metrics={**{f"val/{name}": value for name, value in sums.items()}, "val/preference/num_pairs": len(data)},
        score=accuracy,
        summary=f"validation on {len(data)} pairs: accuracy {accuracy:.3f}, loss {loss:.3f}",
    )
