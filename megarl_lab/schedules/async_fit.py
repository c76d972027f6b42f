"""Fit the costs that `simulate` needs to what a run recorded: its metrics, its rollouts, its settings."""

import itertools
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megarl.config.batches import batch_counts
from megarl.config.schema import Config
from megarl.errors import DataError
from megarl.forecast.calibrate import COUNTERS, LENGTHS, Array, column, recorded_steps
from megarl.record.metrics import RunPaths
from megarl.record.performance import FORWARD_AND_BACKWARD
from megarl.record.rollouts import read_rollouts
from megarl_lab.schedules.simulate import Costs, GroupLengths, Setting, Workload

# In these the trainer waits for engines, or they wait for each other; all else of a step is the trainer's own work.
_NOT_TRAINING = ("timing_s/gen", "timing_s/settle", "timing_s/sync")


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredRun:
    """The costs and samples of a recorded run.

    step_s: the mean time of the later half of its steps, those from which lengths are drawn. has_old_logprobs: whether
    its steps compute old log-probs. notes: say what was estimated rather than measured.
    """

    config: Config
    costs: Costs
    workload: Workload
    step_s: float
    has_old_logprobs: bool
    notes: tuple[str, ...]

    @property
    def setting(self) -> Setting:
        """The numbers of engines and trainers and the staleness that the measured run had."""
        schedule, engine = self.config.rollout.schedule, self.config.rollout.engine
        return Setting(
            num_engines=engine.num_engines,
            num_trainers=self.config.actor.layout.world_size,
            staleness=schedule.staleness,
            finish=schedule.on_update == "finish",
            window=schedule.window(self.config.trainer.prompts_per_step),
            has_old_logprobs=self.has_old_logprobs,
        )


def measure(run_dir: Path) -> MeasuredRun:
    """Fit costs to a run's steps. Raises DataError if RUN is not a run, or has too few steps or no rollouts."""
    paths = RunPaths(run_dir)
    config, steps = recorded_steps(paths)
    workload = Workload(
        prompts_per_step=config.trainer.prompts_per_step,
        num_samples=config.rollout.num_samples,
        groups=_recorded_groups(paths),
    )
    tokens = column(steps, "timing_s/step") * column(steps, "perf/tokens_per_s")
    trained_s = column(steps, "timing_s/step") - sum(column(steps, name) for name in _NOT_TRAINING)
    old_logprobs_s = column(steps, "timing_s/old_log_prob")
    # With one optimizer step, only corrections by weights need old log-probs: runs without one do not have that pass.
    is_extra = batch_counts(config).optimizer_steps_per_step == 1
    trained_s -= old_logprobs_s * is_extra
    train_step_s, train_token_s = fit_non_negative(np.stack([np.ones_like(tokens), tokens], axis=1), trained_s)
    num_trainers = config.actor.layout.world_size
    updates_s = float(np.median(column(steps, "timing_s/update_actor") / tokens)) * num_trainers
    # Device-seconds of a forward pass over a token.
    forward_s = updates_s / config.trainer.num_epochs / FORWARD_AND_BACKWARD
    # Not fitted: what a run recomputes grows with all that it decodes, so that a fit cannot tell them apart.
    recompute_s = forward_s / config.rollout.engine.tp
    decode_step_s, decode_sequence_s, notes = _decode_costs(steps, config, recompute_s)
    notes.append("recomputing after an update: estimated as a third of a token's update")
    old_logprobs_token_s = float(np.median(old_logprobs_s / tokens)) * num_trainers
    if not old_logprobs_token_s:
        old_logprobs_token_s = forward_s
        notes.append("old log-probs of updates in flight: estimated as a third of an update, the run had none")
    if config.placement.offload:
        notes.append("moving models between devices and hosts counts as training, also for splits, which need none")
    costs = Costs(
        decode_step_s=decode_step_s,
        decode_sequence_s=decode_sequence_s,
        max_num_seqs=config.rollout.engine.max_num_seqs,
        recompute_s=recompute_s,
        train_step_s=train_step_s,
        train_token_s=train_token_s * num_trainers,
        old_logprobs_token_s=old_logprobs_token_s if is_extra else 0.0,
        sync_s=float(np.median(column(steps, "timing_s/sync"))),
    )
    return MeasuredRun(
        config=config,
        costs=costs,
        workload=workload,
        step_s=float(np.mean(column(steps, "timing_s/step")[len(steps) // 2 :])),
        has_old_logprobs=is_extra and float(np.median(old_logprobs_s)) > 0,
        notes=tuple(notes),
    )


def fit_non_negative(columns: Array, y: Array) -> list[float]:
    """Return the coefficients x ≥ 0 that minimize ‖columns·x − y‖², those of a subset of the columns, others 0.

    columns: [N, K] with few columns; y: [N]. If subsets fit equally well, the smaller one counts.

    >>> fit_non_negative(np.array([[1.0, 1.0], [1.0, 2.0], [1.0, 3.0]]), np.array([5.0, 7.0, 9.0]))
    [3.0, 2.0]
    """
    best, least = [0.0] * columns.shape[1], float(y @ y)
    for size in range(1, columns.shape[1] + 1):
        for subset in itertools.combinations(range(columns.shape[1]), size):
            x = np.linalg.lstsq(columns[:, subset], y, rcond=None)[0]
            residual = float(np.sum((columns[:, subset] @ x - y) ** 2))
            if min(x) >= 0 and residual < least * (1 - 1e-9) - 1e-18 * float(y @ y):
                values = dict(zip(subset, x, strict=True))
                # Twelve digits: what lies beyond is rounding of the solver.
                best = [float(f"{values.get(i, 0.0):.12g}") for i in range(columns.shape[1])]
                least = residual
    return best


def _decode_costs(
    steps: Sequence[Mapping[str, float]], config: Config, recompute_s: float
) -> tuple[float, float, list[str]]:
    """Return the seconds of a decode step, those of each sequence in it, and notes on what was estimated."""
    if all(name in step for step in steps for name in COUNTERS):
        counts, seqs, busy = (column(steps, name) for name in COUNTERS)
        decoding = busy - recompute_s * column(steps, "perf/recomputed_tokens")
        a, c = fit_non_negative(np.stack([counts, seqs], axis=1), decoding)
        notes: list[str] = []
    else:
        if config.rollout.schedule.staleness > 0:
            raise DataError(
                f"metrics of {config.run.name}: got no {', '.join(COUNTERS)}, expected them of a run with "
                f"rollout.schedule.staleness={config.rollout.schedule.staleness}, whose timing_s/gen says only how "
                "long the trainer waited; name a run that recorded them, or one with staleness 0"
            )
        # All sequences begin together: as many decode steps as the longest has tokens, and a share of all tokens each.
        longest, means, prompts = (column(steps, name) for name in ("response_length/max", *LENGTHS[::2]))
        rows = column(steps, "timing_s/step") * column(steps, "perf/tokens_per_s") / (means + prompts)
        share = rows * means / config.rollout.engine.num_engines
        a, c = fit_non_negative(np.stack([longest, share], axis=1), column(steps, "timing_s/gen"))
        notes = ["decoding: estimated from timing_s/gen and lengths, as the run did not count its engines' steps"]
    if a + c <= 0:
        raise DataError(
            f"metrics of {config.run.name}: their engine times do not grow with the decode steps, expected some that "
            "do; name a run with more steps"
        )
    return a, c, notes


def _recorded_groups(paths: RunPaths) -> tuple[GroupLengths, ...]:
    """Read the lengths of the groups in the later half of a run's rollout files."""
    files = paths.recorded_rollouts()
    groups: dict[tuple[int, str], list[tuple[int, int]]] = defaultdict(list)
    for file in files[len(files) // 2 :]:
        for row in read_rollouts(file):
            groups[row.step, row.uid].append((row.num_prompt_tokens, max(1, row.num_response_tokens)))
    if not groups:
        raise DataError(
            f"{paths.root}/rollouts: got no rollouts, expected those from which lengths are drawn; set "
            "logging.rollout_every_steps >= 1, and logging.num_rollouts to some hundreds"
        )
    return tuple(
        GroupLengths(prompt=math.ceil(sum(p for p, _ in rows) / len(rows)), responses=tuple(r for _, r in rows))
        for rows in groups.values()
    )
