"""Format a comparison as text."""

from megarl.host.unicode import visible
from megarl.record.text_table import align
from megarl.report.summary import REWARD_EDGE_STEPS
from megarl_lab.comparison.groups import Comparison, GroupResult
from megarl_lab.comparison.statistics import CLEAR_P_VALUE

_NONE = "-"


def comparison_text(comparison: Comparison) -> str:
    """Return a table with a row per group, what its columns mean, and the notes of the comparison."""
    header = (
        "algorithm",
        "seeds",
        "before",
        "after",
        "sd",
        "min-max",
        "binomial",
        "reward",
        "mean |Δ|",
        "s/step",
        f"difference from {comparison.baseline}",
    )
    rows = [header, *(_row(group) for group in comparison.groups)]
    lines = [
        *align(rows, left=(0, len(header) - 1)),
        "",
        *_legend(comparison),
        *(visible(f"note: {note}") for note in comparison.notes),
    ]
    return "\n".join(lines)


def _row(group: GroupResult) -> tuple[str, ...]:
    return (
        group.name,
        str(len(group.runs)),
        _number(None if group.before is None else group.before.mean),
        _number(group.after.mean),
        _number(group.after.std),
        f"{group.after.min:.3f}-{group.after.max:.3f}" if group.after.count > 1 else _NONE,
        _number(group.binomial_std_error),
        _number(group.reward),
        _number(group.mismatch_nats, ".1e"),
        _number(group.step_s, ".2f"),
        _difference(group),
    )


def _number(value: float | None, form: str = ".3f") -> str:
    return _NONE if value is None else format(value, form)


def _difference(group: GroupResult) -> str:
    found = group.difference
    if found is None:
        return group.verdict
    error = "" if found.std_error is None else f" ± {found.std_error:.3f}"
    p_value = "" if group.adjusted_p is None else f", p {group.adjusted_p:.2g}"
    least = "" if found.least is None else f", clear from {found.least:.3f}"
    return f"{found.mean:+.3f}{error}{p_value}: {group.verdict}{least}"


def _legend(comparison: Comparison) -> list[str]:
    num_tests = sum(group.adjusted_p is not None for group in comparison.groups)
    lines = [
        "before, after: mean validation score over seeds; sd, min-max: of `after`, over seeds",
        "binomial: standard error of one run's score from the number of validation answers alone, √(p(1−p)/n)",
        f"reward: mean training reward of the last {REWARD_EDGE_STEPS} steps; mean |Δ|: engine against trainer, nats",
    ]
    over, test = ("pairs of one seed", "paired t-test") if comparison.paired else ("seeds", "Welch's t-test")
    if num_tests:
        lines += [
            f"difference: of `after`, ± its standard error over {over}; p: {test}, Holm-corrected for "
            f"{num_tests} comparison(s), clear below {CLEAR_P_VALUE:g}",
            "a difference within noise may still exist: few seeds show large differences only",
            "clear from: the smallest difference that this spread would have shown, in a single comparison",
        ]
    return lines
