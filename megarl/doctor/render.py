"""Print what `megarl doctor` found, as a table or as JSON."""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict

from megarl.device.platform import platform
from megarl.doctor.finding import Finding, Status
from megarl.doctor.machine import check_machine, check_sandbox
from megarl.doctor.packages import check_packages
from megarl.host.streams import print_lines


def print_diagnosis(check_megatron: Callable[[], None], *, as_json: bool) -> bool:
    """Check packages and machine, print the findings, and return whether a run can start here."""
    findings = [*check_packages(check_megatron), *check_machine(platform()), check_sandbox()]
    if as_json:
        rows = [asdict(finding) for finding in findings]
        print(json.dumps({"can_start": can_start(findings), "findings": rows}, indent=2))
    else:
        print_lines(*to_lines(findings))
    return can_start(findings)


def can_start(findings: Sequence[Finding]) -> bool:
    """Return whether a run can start, that is, whether no finding has the status `missing`."""
    return all(finding.status is not Status.MISSING for finding in findings)


def to_lines(findings: Sequence[Finding]) -> list[str]:
    """Return a table with a line per finding, its advice below it, and a verdict at the end."""
    width = max(len(finding.subject) for finding in findings)
    lines = []
    for finding in findings:
        lines.append(f"{finding.status:<8}{finding.subject:<{width}}  {finding.found}")
        if finding.advice:
            lines.append(f"{'':<8}{'':<{width}}  → {finding.advice}")
    counts = {status: sum(f.status is status for f in findings) for status in Status}
    verdict = "a run can start here" if can_start(findings) else "a run cannot start here"
    return [*lines, f"{verdict}: {', '.join(f'{n} {status}' for status, n in counts.items())}"]
