"""Compare runs of several algorithms: means over seeds, their spread, and which differences exceed it."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from megarl.errors import ConfigError, DataError
from megarl.host.unicode import visible
from megarl.report.run import Run
from megarl.report.summary import REWARD_EDGE_STEPS, SAMPLED, MeanScore, validation_curve
from megarl_lab.comparison.statistics import (
    CLEAR_P_VALUE,
    Difference,
    Spread,
    difference_of,
    holm,
    paired_difference,
    spread_of,
)

# Settings in which runs of a comparison differ anyway.
_OWN_SETTINGS = ("algo.", "run.", "logging.")


# Runs can be grouped by the algorithm, or the run's name without its seed (`cpo-wide-seed2` → `cpo-wide`).
GROUPINGS: Mapping[str, Callable[[Run], str]] = {
    "algo": lambda run: visible(str(run.config.get("algo", {}).get("name"))),
    "name": lambda run: visible(str(run.config.get("run", {}).get("name"))).rpartition("-seed")[0] or run.label,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """The result of one run, with scores that are means over validation answers.

    before: None if step 0 was not validated. reward: mean training reward of the last `REWARD_EDGE_STEPS` steps.
    mismatch_nats, step_s: means over all steps.
    """

    label: str
    seed: int
    steps: int
    before: MeanScore | None
    after: MeanScore
    reward: float | None
    mismatch_nats: float | None
    step_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupResult:
    """The result of a group: the runs of one algorithm, one per seed.

    binomial_std_error: the noise in one run's final score that comes from having only n validation answers, √(p(1 −
    p)/n), as root mean square over the runs. difference: the mean final score minus the baseline's; None for the
    baseline. adjusted_p: p-value of the difference, corrected for the number of comparisons; None if there is none.
    """

    name: str
    runs: tuple[RunResult, ...]
    before: Spread | None
    after: Spread
    binomial_std_error: float | None
    reward: float | None
    mismatch_nats: float | None
    step_s: float | None
    difference: Difference | None = None
    adjusted_p: float | None = None

    @property
    def verdict(self) -> str:
        """Return in words whether the difference from the baseline exceeds what seeds explain."""
        if self.difference is None:
            return "baseline"
        if self.difference.std_error is None:
            return "one seed: cannot tell"
        if self.adjusted_p is None:
            return "no spread over seeds: cannot tell" if self.difference.mean else "equal"
        if self.adjusted_p >= CLEAR_P_VALUE:
            return "within noise"
        return "clearly higher" if self.difference.mean > 0 else "clearly lower"


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """A comparison of groups of runs, in the order in which their first runs were given.

    notes: reasons for which the groups may not be comparable. paired: differences are between runs of equal seeds.
    """

    baseline: str
    paired: bool
    groups: tuple[GroupResult, ...]
    notes: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return the comparison as plain data, with verdicts and the standard errors of scores."""
        data = asdict(self)
        for group, fields in zip(self.groups, data["groups"], strict=True):
            fields["verdict"] = group.verdict
            for run, run_fields in zip(group.runs, fields["runs"], strict=True):
                for name in ("before", "after"):
                    if (estimate := getattr(run, name)) is not None:
                        run_fields[name]["std_error"] = estimate.std_error
        return data


def group_runs(runs: Sequence[Run], by: str) -> dict[str, list[Run]]:
    """Group runs by algorithm or by name, in order of appearance.

    by: `algo` (algo.name) or `name` (run.name without `-seedN`).

    Raises:
        DataError: two runs of a group have the same seed.
    """
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(GROUPINGS[by](run), []).append(run)
    for name, members in groups.items():
        seeds: dict[int, str] = {}
        for run in members:
            if (other := seeds.setdefault(_seed_of(run), run.label)) != run.label:
                raise DataError(
                    f"{other} and {run.label} are both {name} with seed {_seed_of(run)}, expected a run per seed; "
                    f"leave one out, or group by {' or '.join(b for b in GROUPINGS if b != by)}"
                )
    return groups


def compare(
    groups: Mapping[str, Sequence[Run]], baseline: str | None = None, *, paired: bool = False, last: int = 1
) -> Comparison:
    """Compute each group's results and their differences from the baseline.

    baseline: the name of a group; None takes the first. paired: compare each run with the baseline's run of the same
    seed, for groups that share more than their settings, such as the same prompts in the same order. last: how many of
    a run's last validations its score is the mean of.

    Raises:
        ConfigError: no group has the baseline's name.
        DataError: a run has fewer validations, or a group shares no seed with the baseline.
    """
    baseline = baseline or next(iter(groups))
    if baseline not in groups:
        raise ConfigError(f"baseline: got {baseline!r}, expected one of: {', '.join(groups)}")
    results = {name: _group_result(name, members, last) for name, members in groups.items()}
    totals = [(run, run.config.get("trainer", {}).get("total_steps")) for members in groups.values() for run in members]
    unfinished = [
        f"{run.label} {'has collapsed' if _has_collapsed(run) else 'is not finished'}: {run.last_step} of {total} steps"
        for run, total in totals
        if isinstance(total, int) and run.last_step < total
    ]
    difference = _paired if paired else lambda group, base: difference_of(group.after, base.after)
    others = {n: difference(g, results[baseline]) for n, g in results.items() if n != baseline}
    p_values = {name: d.p_value for name, d in others.items() if d.p_value is not None}
    adjusted = dict(zip(p_values, holm(list(p_values.values())), strict=True))
    return Comparison(
        baseline=baseline,
        paired=paired,
        groups=tuple(replace(g, difference=others.get(n), adjusted_p=adjusted.get(n)) for n, g in results.items()),
        notes=(*unfinished, *_differing_settings(groups)),
    )


def _has_collapsed(run: Run) -> bool:
    count = run.config.get("validation", {}).get("stop_after_zeros") or 0
    scores = [point.score for point in validation_curve(run, SAMPLED)]
    return count > 0 and any(scores[:-count]) and not any(scores[-count:])


def _paired(group: GroupResult, baseline: GroupResult) -> Difference:
    scores = {run.seed: run.after.score for run in baseline.runs}
    pairs = [(run.after.score, scores[run.seed]) for run in group.runs if run.seed in scores]
    if not pairs:
        raise DataError(
            f"{group.name}: got seeds {[run.seed for run in group.runs]}, expected some of {list(scores)}, those of "
            f"{baseline.name}; compare without pairs"
        )
    return paired_difference(pairs)


def _seed_of(run: Run) -> int:
    return int(run.config.get("run", {}).get("seed", 0))


def _group_result(name: str, members: Sequence[Run], last: int) -> GroupResult:
    runs = tuple(_run_result(run, last) for run in members)
    befores = [r.before.score for r in runs if r.before is not None]
    errors = [r.after.std_error for r in runs if r.after.std_error is not None]
    sum_of_squares = math.fsum(error**2 for error in errors)
    return GroupResult(
        name=name,
        runs=runs,
        before=spread_of(befores) if len(befores) == len(runs) else None,
        after=spread_of([r.after.score for r in runs]),
        binomial_std_error=math.sqrt(sum_of_squares / len(errors)) if len(errors) == len(runs) else None,
        reward=_mean([r.reward for r in runs if r.reward is not None]),
        mismatch_nats=_mean([r.mismatch_nats for r in runs if r.mismatch_nats is not None]),
        step_s=_mean([r.step_s for r in runs if r.step_s is not None]),
    )


def _run_result(run: Run, last: int) -> RunResult:
    curve = validation_curve(run, SAMPLED)
    if len(curve) < last:
        raise DataError(
            f"{run.label}: has {len(curve) or 'no'} validation scores ({SAMPLED}…), expected at least {last}; compare "
            "runs with data.val that have gone on as far, or fewer of their last scores"
        )
    ends = curve[-last:]
    counts = [point.num_prompts for point in ends if point.num_prompts]
    after = MeanScore(
        step=ends[-1].step,
        score=math.fsum(point.score for point in ends) / last,
        num_prompts=sum(counts) if len(counts) == last else None,
    )
    return RunResult(
        label=run.label,
        seed=_seed_of(run),
        steps=run.last_step,
        before=curve[0] if curve[0].step == 0 else None,
        after=after,
        reward=_mean(run.get("critic/score/mean").values[-REWARD_EDGE_STEPS:]),
        mismatch_nats=_mean(run.get("mismatch/abs_mean").values),
        step_s=_mean(run.get("timing_s/step").values),
    )


def _mean(values: Sequence[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None


def _differing_settings(groups: Mapping[str, Sequence[Run]]) -> list[str]:
    """List the settings outside the algorithm that differ between runs, so that a reader sees whether budgets were
    equal.
    """
    settings = [(name, dict(_leaves(run.config))) for name, members in groups.items() for run in members]
    keys = dict.fromkeys(key for _, values in settings for key in values if not key.startswith(_OWN_SETTINGS))
    notes = []
    for key in keys:
        names_by_value: dict[str, dict[str, None]] = {}
        for name, values in settings:
            names_by_value.setdefault(str(values.get(key, "not set")), {})[name] = None
        if len(names_by_value) > 1:
            shown = "; ".join(f"{value} ({_some(list(names))})" for value, names in names_by_value.items())
            notes.append(f"{key} differs: {shown}")
    return notes


def _leaves(tree: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the settings of a nested configuration as dotted keys with their values."""
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{path}{key}.")
        else:
            yield f"{path}{key}", value


def _some(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) <= 3 else f"{', '.join(names[:2])} and {len(names) - 2} more"
