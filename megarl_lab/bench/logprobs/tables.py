"""A report as text: a table of measurements, agreement with float64, and the limits."""

from collections.abc import Sequence

from megarl.record.text_table import align
from megarl_lab.bench.logprobs.campaign import gemm_bound_s
from megarl_lab.bench.logprobs.contenders import CONTENDERS
from megarl_lab.bench.logprobs.limits import Judgement
from megarl_lab.bench.logprobs.records import GIB, MIB, HeadAgreement, Measurement, Report, Size, Traffic

_NONE = "-"
_DIFFERENCES = ("log-prob", "entropy", "hidden gradient", "weight gradient")
_HEADER = (
    "contender",
    "V",
    "N",
    "MiB",
    "fwd coll.",
    "B/token",
    "bwd coll.",
    "B/token",
    "forward s",
    "fwd+bwd s",
    "range",
    "bound/time",
)
_LEGEND = (
    "MiB: peak over inputs, gradients included, of the rank with most.  coll., B/token: collectives and the bytes that "
    "a rank hands to them.",
    "s: medians of the rounds, of the slower rank; range: of fwd+bwd.  bound/time: time of the matrix multiplications "
    "alone ÷ fwd+bwd.",
)


def report_text(report: Report) -> str:
    """Measurements by size, agreement, what the columns mean, and notes."""
    sizes = sorted({m.size for m in report.measurements})
    rows = [_row(report, m, _at(report, size)) for size in sizes for m in _at(report, size)]
    names = dict.fromkeys(m.contender for m in report.measurements)
    notes = [f"{name}: {CONTENDERS.get(name).note}" for name in names if CONTENDERS.get(name).note]
    missing = [f"{name}: not measured, or not to the end: {why}" for name, why in report.unavailable.items()]
    setup = f"{report.device}, {report.dtype}, {report.world_size} rank{'s' if report.world_size > 1 else ''}"
    setup += ", weight gradients into main gradients" if report.main_grad else ""
    versions = ", ".join(f"{name} {version}" for name, version in sorted(report.versions.items()))
    return "\n".join(
        [
            f"{setup}; {versions}",
            "",
            *align([_HEADER, *rows]),
            "",
            *_LEGEND,
            *notes,
            *missing,
            "",
            "Largest difference from dense float64, relative to the largest element:",
            *align([("contender", *_DIFFERENCES, "verdict"), *(_agreement_row(each) for each in report.agreements)]),
            *_relative_errors(report),
        ]
    )


def limits_text(judgements: Sequence[Judgement]) -> str:
    """A row per limit."""
    header = ("limit", "at most", "largest", "where", "verdict")
    rows = [
        (
            each.limit.name,
            f"{each.limit.at_most:g}",
            _NONE if each.worst is None else f"{each.worst.value:.3g}",
            _NONE if each.worst is None else each.worst.where,
            each.verdict.value,
        )
        for each in judgements
    ]
    return "\n".join(align([header, *rows], left=(0, 3, 4)))


def _at(report: Report, size: Size) -> list[Measurement]:
    return [m for m in report.measurements if m.size == size]


def _row(report: Report, measurement: Measurement, beside: Sequence[Measurement]) -> tuple[str, ...]:
    m, num_gemms = measurement, CONTENDERS.get(measurement.contender).num_gemms
    bound_s = gemm_bound_s({each.contender: each for each in beside}, num_gemms)
    share = None if bound_s is None or m.median_total_s is None else bound_s / m.median_total_s
    return (
        m.contender,
        str(m.size.vocab),
        str(m.size.rows),
        _memory(m),
        *_traffic(m.forward, m.size),
        *_traffic(m.backward, m.size),
        _number(m.median_forward_s, ".3f"),
        _number(m.median_total_s, ".3f"),
        f"{min(m.total_s):.3f}-{max(m.total_s):.3f}" if m.total_s else _NONE,
        _number(share, ".0%"),
    )


def _memory(measurement: Measurement) -> str:
    if measurement.predicted_bytes is not None:
        return f"predicted out of memory: {measurement.predicted_bytes / GIB:.1f} GiB"
    return _number(None if measurement.memory_bytes is None else measurement.memory_bytes / MIB, ".0f")


def _traffic(traffic: Traffic | None, size: Size) -> tuple[str, str]:
    if traffic is None:
        return _NONE, _NONE
    return str(traffic.num_collectives), f"{traffic.num_bytes / size.rows:.0f}"


def _agreement_row(agreement: HeadAgreement) -> tuple[str, ...]:
    found = (agreement.differences.get(name) for name in _DIFFERENCES)
    verdict = "agrees" if agreement.agrees else f"DISAGREES (more than {agreement.tolerance:g})"
    return (agreement.contender, *(_number(value, ".1e") for value in found), verdict)


def _relative_errors(report: Report) -> list[str]:
    if not report.relative_errors:
        return []
    rows = [
        (name, *(_number(found.get(each), ".1e") for each in _DIFFERENCES))
        for name, found in report.relative_errors.items()
    ]
    return [
        "",
        "‖got − dense float64‖ ÷ ‖dense float64‖, whole vocabulary:",
        *align([("contender", *_DIFFERENCES), *rows]),
    ]


def _number(value: float | None, form: str) -> str:
    return _NONE if value is None else format(value, form)
