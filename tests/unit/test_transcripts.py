"""What the pages show of `megarl train` is what it prints."""

import contextlib
import re
import shlex
from pathlib import Path

import pytest

from megarl.cli import main

REPOSITORY = Path(__file__).parents[2]
PAGES = [REPOSITORY / "docs/dry-run.md"]


def transcripts() -> dict[str, list[str]]:
    """Arguments of `megarl` → the lines under the command; a first line `...` stands for more lines."""
    shown: dict[str, list[str]] = {}
    lines: list[str] = []
    for page in PAGES:
        before = len(shown)
        for line in page.read_text(encoding="utf-8").splitlines():
            if command := re.fullmatch(r"    \$ megarl (train .*)", line):
                lines = shown.setdefault(command[1], [])
            elif line.startswith("    ") and not line.startswith("    $"):
                lines.append(line.removeprefix("    "))
            else:
                lines = []
        assert len(shown) > before, f"{page} shows no command"
    return shown


@pytest.mark.parametrize("command", transcripts())
def test_transcript(command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(REPOSITORY)
    monkeypatch.setenv("COLUMNS", "120")
    # Errors exit.
    with contextlib.suppress(SystemExit):
        main(shlex.split(command))
    printed = "".join(capsys.readouterr())
    expected = transcripts()[command]
    if expected[0] == "...":
        assert "\n".join(["", *expected[1:], ""]) in printed
    else:
        assert printed.splitlines() == expected
