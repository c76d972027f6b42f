"""`megarl doctor`: the diagnosis as a table or as JSON."""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict

from megarl.device.platform import platform
from megarl.doctor.finding import Finding, Status
from megarl.doctor.machine import check_machine
from megarl.doctor.packages import check_packages
from megarl.doctor.sandbox import check_sandbox


def print_diagnosis(check_megatron: Callable[[], None], *, as_json: bool) -> bool:
    """Look, print, and say whether a run can start."""
    findings = [*check_packages(check_megatron), *check_machine(platform()), *check_sandbox()]
    print(to_json(findings) if as_json else to_text(findings))
    return can_start(findings)


def can_start(findings: Sequence[Finding]) -> bool:
    """Whether nothing is missing."""
    return all(finding.status is not Status.MISSING for finding in findings)


def to_json(findings: Sequence[Finding]) -> str:
    """`can_start`, and the findings field by field."""
    return json.dumps({"can_start": can_start(findings), "findings": [asdict(f) for f in findings]}, indent=2)


def to_text(findings: Sequence[Finding]) -> str:
    """A line per finding, its advice below it, and a verdict."""
    width = max(len(finding.subject) for finding in findings)
    lines = []
    for finding in findings:
        lines.append(f"{finding.status:<8}{finding.subject:<{width}}  {finding.found}")
        if finding.advice:
            lines.append(f"{'':<8}{'':<{width}}  → {finding.advice}")
    counts = {status: sum(f.status is status for f in findings) for status in Status}
    verdict = "a run can start here" if can_start(findings) else "a run cannot start here"
    return "\n".join([*lines, f"{verdict}: {', '.join(f'{n} {status}' for status, n in counts.items())}"])
