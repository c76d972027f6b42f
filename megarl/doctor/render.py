"""Print what `megarl doctor` found, as a table or as JSON."""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

from megarl.doctor.finding import Finding, Severity
from megarl.doctor.machine import check_machine, check_sandbox
from megarl.doctor.packages import check_packages
from megarl.host.device.platform import platform
from megarl.host.streams import print_lines

CAN_START = ("a run can start here", "a run cannot start here")
IS_SAFE = ("no other user can steer a run here", "another user can steer a run here")


def print_diagnosis(check_megatron: Callable[[], Sequence[str]], *, as_json: bool) -> bool:
    """Check packages and machine, print the findings, and return whether a run can start here."""
    findings = [*check_packages(check_megatron), *check_machine(platform()), check_sandbox()]
    _print(findings, "can_start", CAN_START, as_json=as_json)
    return is_well(findings)


def print_security(run_dir: Path | None, require_plain_data: Callable[[Path], None], *, as_json: bool) -> bool:
    """Check who else can read, steer or join runs, print the findings, and return whether no other user can steer one.

    The arguments are those of `check_security`.
    """
    # This module needs packages, and `print_diagnosis` has to work without any.
    from megarl.doctor.security import check_security

    findings = list(check_security(run_dir, require_plain_data))
    _print(findings, "is_safe", IS_SAFE, as_json=as_json)
    return is_well(findings)


def is_well(findings: Sequence[Finding]) -> bool:
    """Return whether findings are at most warnings."""
    return all(finding.status in (Severity.OK, Severity.WARN) for finding in findings)


def _print(findings: Sequence[Finding], key: str, verdicts: tuple[str, str], *, as_json: bool) -> None:
    if as_json:
        print(json.dumps({key: is_well(findings), "findings": [asdict(finding) for finding in findings]}, indent=2))
    else:
        print_lines(*to_lines(findings, verdicts))


def to_lines(findings: Sequence[Finding], verdicts: tuple[str, str]) -> list[str]:
    """Return a table with a line per finding, its advice below it, and the first or the second verdict at the end."""
    width = max(len(finding.subject) for finding in findings)
    lines = []
    for finding in findings:
        lines.append(f"{finding.status:<8}{finding.subject:<{width}}  {finding.found}")
        if finding.advice:
            lines.append(f"{'':<8}{'':<{width}}  → {finding.advice}")
    counts = {status: sum(f.status is status for f in findings) for status in Severity}
    verdict = verdicts[0] if is_well(findings) else verdicts[1]
    return [*lines, f"{verdict}: {', '.join(f'{n} {status}' for status, n in counts.items() if n)}"]
