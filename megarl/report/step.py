"""Explain one step of a run from its record: what taught, what was taken away, what moved, and what took the time.

A token's *signal* is advantage × correction weight × its share in the aggregation: the gradient of the objective with
respect to the token's log-prob at the step's first update, up to one factor per optimizer batch. Its *pull*,
|signal| · (1 − p) with the policy's probability p of the token, is the gradient with respect to the token's own logit:
a token of which the policy is sure pulls at nothing.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from megarl.algos.aggregation import AGGREGATIONS
from megarl.algos.batch_statistics import optimizer_batches
from megarl.algos.corrections import CorrectionInputs, compute_correction
from megarl.config.batches import mini_batch_prompts
from megarl.config.load import saved_config
from megarl.config.torch_later import torch
from megarl.errors import ConfigError, DataError
from megarl.host.unicode import visible
from megarl.record.metrics import RunPaths
from megarl.record.rollouts import RolloutRecord, read_rollouts
from megarl.record.text_table import align
from megarl.record.timeline import STEP_LANE, TRAINER_LANE, WAITING, covered_s
from megarl.report.figures import StepWindow, window_of
from megarl.report.learning_curve import samples_per_step
from megarl.report.run import Run

Numbers: TypeAlias = npt.NDArray[np.float32]

# How many groups and tokens are named, and phases of the trainer.
NUM_NAMED, NUM_PHASES = 8, 4
# An engine that works by this share of the step longer than the first to end is named.
TAIL_FRAC = 0.05
# Why a token of a response taught nothing, in this order, and how often; the last one did.
FATES = ("only read", "row did not train", "advantage 0", "rejected by the correction", "taught")
# Metrics of the whole step → what was taken away; said if the number is above 0.
_TAKEN: Mapping[str, Callable[[float], str]] = {
    "filter/num_groups_removed": lambda n: f"algo.filter removed {n:g} groups",
    "reward/dropped_frac": lambda x: f"{x:.1%} of samples had no verdict",
    "response_length/clip_ratio": lambda x: f"{x:.1%} of responses were cut at rollout.max_response_tokens",
    "is/accept_frac": lambda x: f"the correction rejected {1 - x:.1%} of tokens" if x < 1 else "",
    "is/veto_frac": lambda x: f"its veto dropped {x:.1%} of rows",
    "is/ess": lambda x: f"its weights left an effective sample size of {x:.1%}" if x < 0.9995 else "",
    "actor/pg_clipfrac": lambda x: f"the ratio's clip held {x:.2%} of tokens, mean over updates",
    "actor/pg_clipfrac_lower": lambda x: f"the dual clip {x:.2%}",
}
# Metrics of what moved in the optimizer's steps; the rest of the name is a layer.
MOVED = "actor/update_ratio/"


@dataclass(frozen=True, slots=True, kw_only=True)
class TaughtGroup:
    """The recorded samples of a prompt; share: of the signal of all recorded tokens, as sizes."""

    uid: str
    num_samples: int
    num_right: int
    mean_reward: float
    share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TaughtToken:
    """A token with a large pull; share: of that of all recorded tokens. prob: the policy's before the update."""

    row: str
    place: int
    text: str
    advantage: float
    weight: float
    prob: float
    share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StepExplanation:
    """The explanation of a step by its record.

    rows: labels of the recorded samples, group by group; signals: of their tokens. fates: shares of all these tokens.
    moved: change of each layer's weights, as a share of their norm. window: when who worked. sentences: a topic and
    what is to say of it.
    """

    step: int
    rows: tuple[str, ...]
    signals: tuple[Numbers, ...]
    groups: tuple[TaughtGroup, ...]
    tokens: tuple[TaughtToken, ...]
    fates: Mapping[str, float]
    moved: Mapping[str, float]
    window: StepWindow | None
    sentences: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tokens:
    """Arrays [B, T] of recorded rows; 0 outside their responses, where fates, numbers of `FATES`, are −1."""

    advantages: Numbers
    weights: Numbers
    signals: Numbers
    probs: Numbers
    fates: "np.typing.NDArray[np.int64]"

    @property
    def pulls(self) -> Numbers:
        return np.abs(self.signals) * (1 - self.probs)


def explain_step(run: Run, paths: RunPaths, step: int) -> StepExplanation:
    """Explain a step of a run; raise DataError if the run has logged no training step of this number."""
    if "timing_s/step" not in run.values_at(step):
        raise DataError(f"{paths.root}: has logged no training step {step}; expected one from 1 to {run.last_step}")
    file = paths.rollouts(step)
    return explain(run, step, read_rollouts(file) if file.is_file() else [])


def explain(run: Run, step: int, records: Sequence[RolloutRecord]) -> StepExplanation:
    """Explain a step by its metrics, its timeline and these recorded samples; without any, groups and tokens are not
    known.
    """
    place = {uid: i for i, uid in enumerate(dict.fromkeys(record.uid for record in records))}
    known = sorted((record for record in records if record.tokens), key=lambda record: place[record.uid])
    metrics = run.values_at(step)
    taken = [words for name, say in _TAKEN.items() if metrics.get(name) and (words := say(metrics[name]))]
    clip = run.config.get("actor", {}).get("optimizer", {}).get("clip_grad_norm", 1.0)
    if (norm := metrics.get("actor/grad_norm", 0.0)) > clip:
        taken.append(f"the gradient's norm, {norm:.3g}, was clipped at {clip:g}")
    moved = {name.removeprefix(MOVED): value for name, value in metrics.items() if name.startswith(MOVED)}
    bars = [each for each in run.timeline if each.lane == STEP_LANE and each.step == step]
    window = window_of(run.timeline, bars[-1:]) if bars else None
    samples: list[tuple[str, str]] = [("groups", "not recorded; set logging.rollout_every_steps=1")]
    groups: tuple[TaughtGroup, ...] = ()
    fates: dict[str, float] = {}
    order: list[int] = []
    x: _Tokens | None = None
    if known:
        x, remark = _tokens(run.config, known)
        groups, num_tokens = _groups(known, x), np.count_nonzero(x.fates >= 0)
        place = {group.uid: i for i, group in enumerate(groups)}
        order = sorted(range(len(known)), key=lambda i: place[known[i].uid])
        fates = {fate: float(np.count_nonzero(x.fates == i) / num_tokens) for i, fate in enumerate(FATES)}
        samples = _about_samples(run, x, groups, fates, remark)
    return StepExplanation(
        step=step,
        rows=tuple(f"{record.uid}/{record.sample_index}" for record in (known[i] for i in order)),
        signals=() if x is None else tuple(x.signals[i, : len(known[i].tokens)] for i in order),
        groups=groups,
        tokens=() if x is None else _largest(known, x),
        fates=fates,
        moved=moved,
        window=window,
        sentences=(
            *samples,
            ("taken away", "; ".join(taken) or "nothing of the whole step"),
            ("moved", _movement(moved)),
            ("time", _time(run, step, window)),
        ),
    )


def _tokens(config: Mapping[str, object], records: Sequence[RolloutRecord]) -> tuple[_Tokens, str]:
    """Compute the weights of recorded samples again; return also why they are left out, if they are."""
    shape = (len(records), max(len(record.tokens) for record in records))
    advantages, ours, engine, probs = (np.zeros(shape, np.float32) for _ in range(4))
    fates, given = np.full(shape, -1), np.zeros(shape, bool)
    for i, record in enumerate(records):
        n = len(record.tokens)
        advantages[i, : len(record.advantage)] = record.advantage
        ours[i, : len(record.old_logprobs)] = record.old_logprobs
        theirs = np.array(record.rollout_logprobs or [None] * n, np.float32)
        engine[i, :n], probs[i, :n] = np.nan_to_num(theirs), np.exp(record.old_logprobs or theirs)
        read = [turn.is_read for turn in record.turns for _ in range(turn.num_tokens)] or [False] * n
        kind = FATES.index("taught" if record.advantage else "row did not train")
        fates[i, :n] = np.where(read, FATES.index("only read"), kind)
        given[i, :n] = np.isnan(theirs) & ~np.array(read)
    trains = fates == FATES.index("taught")
    weights, share, remark = trains.astype(np.float32), trains.astype(np.float32), ""
    mask, loss = torch.from_numpy(trains), torch.zeros(shape, requires_grad=True)
    try:
        saved = saved_config(config)
        correction, local_sum = saved.algo.correction, AGGREGATIONS.get(saved.algo.aggregation).local_sum
        share = torch.autograd.grad(local_sum(loss, mask), loss)[0].numpy()
        if correction.name != "none" and all(record.old_logprobs for record in records if record.advantage):
            inputs = CorrectionInputs(
                old_logprobs=torch.from_numpy(ours),
                rollout_logprobs=torch.from_numpy(engine),
                advantages=torch.from_numpy(advantages),
                loss_mask=mask,
                demonstration_mask=torch.from_numpy(given),
            )
            batches = optimizer_batches([record.uid for record in records], mini_batch_prompts(saved.trainer))
            weights = compute_correction(inputs, correction, batches).weights.numpy()
    except ConfigError as error:
        # A plugin of the run, or a setting of another version.
        remark = f"weights of correction and aggregation are left out: {error}"
    fates[trains & (weights == 0)] = FATES.index("rejected by the correction")
    fates[trains & (advantages == 0)] = FATES.index("advantage 0")
    found = _Tokens(
        advantages=advantages, weights=weights, signals=advantages * weights * share, probs=probs, fates=fates
    )
    return found, remark


def _groups(records: Sequence[RolloutRecord], x: _Tokens) -> tuple[TaughtGroup, ...]:
    """Return the groups of recorded samples, those that taught most first."""
    sizes, total = np.abs(x.signals).sum(1, dtype=np.float64), np.abs(x.signals).sum(dtype=np.float64) or 1.0
    found = []
    for uid in dict.fromkeys(record.uid for record in records):
        at = [i for i, record in enumerate(records) if record.uid == uid]
        found.append(
            TaughtGroup(
                uid=uid,
                num_samples=len(at),
                num_right=sum(records[i].correct for i in at),
                mean_reward=sum(records[i].reward for i in at) / len(at),
                share=float(sizes[at].sum() / total),
            )
        )
    return tuple(sorted(found, key=lambda group: -group.share))


def _largest(records: Sequence[RolloutRecord], x: _Tokens) -> tuple[TaughtToken, ...]:
    """Return the tokens with the largest pull, largest first."""
    total = x.pulls.sum(dtype=np.float64) or 1.0
    found = []
    for flat in np.argsort(-x.pulls, axis=None, kind="stable")[:NUM_NAMED]:
        i, t = (int(each) for each in np.unravel_index(flat, x.pulls.shape))
        if x.pulls[i, t] > 0:
            found.append(
                TaughtToken(
                    row=f"{records[i].uid}/{records[i].sample_index}",
                    place=t,
                    text=records[i].tokens[t],
                    advantage=float(x.advantages[i, t]),
                    weight=float(x.weights[i, t]),
                    prob=float(x.probs[i, t]),
                    share=float(x.pulls[i, t] / total),
                )
            )
    return tuple(found)


def _about_samples(
    run: Run, x: _Tokens, groups: Sequence[TaughtGroup], fates: Mapping[str, float], remark: str
) -> list[tuple[str, str]]:
    """Say what groups and tokens of the recorded samples taught."""
    taught, num_rows = [group for group in groups if group.share > 0], len(x.signals)
    alike = sum(group.share == 0 and group.num_right in (0, group.num_samples) for group in groups)
    of_all = f"of {total} " if (total := samples_per_step(run)) and total != num_rows else ""
    said = f"{len(taught)} of {len(groups)} taught ({num_rows} {of_all}samples recorded)"
    if alike:
        said += f"; {alike} of the others had only right or only wrong answers"
    if taught:
        said += f"; {taught[0].uid} carried most"
    up = float(x.signals[x.signals > 0].sum(dtype=np.float64)), float(-x.signals[x.signals < 0].sum(dtype=np.float64))
    pulls, sizes = np.sort(x.pulls[x.fates >= 0])[::-1], sum(up) or 1.0
    tenth = max(1, len(pulls) // 10)
    largest = pulls[:tenth].sum(dtype=np.float64) / (pulls.sum(dtype=np.float64) or 1.0)
    kinds = ", ".join(f"{fate}: {fates[fate]:.1%}" for fate in FATES if fates[fate])
    tokens = f"{kinds}; {up[0] / sizes:.0%} of the signal made tokens likelier, {up[1] / sizes:.0%} less likely"
    tokens += f"; the tenth with the largest pull had {largest:.0%} of all pull"
    return [("groups", said), ("tokens", tokens + (f"; {remark}" if remark else ""))]


def _movement(moved: Mapping[str, float]) -> str:
    if not moved:
        return "not recorded"
    most, least = max(moved, key=lambda name: moved[name]), min(moved, key=lambda name: moved[name])
    return f"{most} most, by {moved[most]:.2e} of its weights' norm, {least} least, by {moved[least]:.2e}"


def _time(run: Run, step: int, window: StepWindow | None) -> str:
    """Say what the step's time went to, and what limited it."""
    spent, every = run.values_at(step), run.get("timing_s/step").values
    total = spent["timing_s/step"]
    said = f"{total:.3g} s, {total / median(every):.2g} times the median step"
    if window is None:
        return f"{said}; no timeline was recorded"
    start, end = window.steps[0].start_s, window.steps[-1].end_s
    of_phase: dict[str, list[tuple[float, float]]] = {}
    engines: dict[str, list[tuple[float, float]]] = {}
    for each in window.intervals:
        to = of_phase if each.lane == TRAINER_LANE else engines
        to.setdefault(each.name if each.lane == TRAINER_LANE else each.lane, []).append((each.start_s, each.end_s))
    shares = {name: covered_s(times, (start, end)) / (end - start) for name, times in of_phase.items()}
    largest = sorted(shares, key=lambda name: -shares[name])[:NUM_PHASES]
    said += "; " + ", ".join(f"{name} {shares[name]:.0%}" for name in largest)
    waits = sum(share for name, share in shares.items() if name in WAITING)
    busy = {name: covered_s(times, (start, end)) / (end - start) for name, times in engines.items()}
    if busy:
        said += f"; engines worked {sum(busy.values()) / len(busy):.0%} of it"
        last = {name: max(stop for _, stop in times) for name, times in engines.items()}
        if (apart := max(last.values()) - min(last.values())) > TAIL_FRAC * (end - start):
            said += f", {max(last, key=lambda name: last[name])} {apart:.3g} s longer than the first to end"
    limit = "samples and rewards" if waits > sum(shares.values()) / 2 else f"the trainer, in {largest[0]}"
    return f"{said}. Limit: {limit}" if largest else said


def to_text(explained: StepExplanation) -> list[str]:
    """Say in lines for a terminal what a step's record shows."""
    width = max(len(topic) for topic, _ in explained.sentences)
    lines = [f"{topic:{width}}  {visible(words)}" for topic, words in explained.sentences]
    if explained.groups:
        rows = [("group", "samples", "right", "mean reward", "share of signal")]
        rows += [
            (g.uid, str(g.num_samples), str(g.num_right), f"{g.mean_reward:.3g}", f"{g.share:.1%}")
            for g in explained.groups[:NUM_NAMED]
        ]
        lines += ["", *align(rows)]
    if explained.tokens:
        names = [("sample", "token", "text", "advantage", "weight", "probability", "share of pull")]
        names += [
            (
                t.row,
                str(t.place),
                repr(t.text),
                f"{t.advantage:.3g}",
                f"{t.weight:.3g}",
                f"{t.prob:.3f}",
                f"{t.share:.1%}",
            )
            for t in explained.tokens
        ]
        lines += ["", *align(names, left=(0, 2))]
    return lines
