"""What docs/convert.md shows is what the commands print, but for times and free space."""

import contextlib
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from megarl.cli import main
from megarl.convert import engine

REPOSITORY = Path(__file__).parents[3]
PAGE = REPOSITORY / "docs" / "convert.md"


@pytest.fixture(autouse=True)
def _no_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """For slow disks."""
    monkeypatch.setattr(engine, "fsync", lambda path: None)


def transcripts() -> list[tuple[str, list[str]]]:
    """(command, lines it prints), in the order of the page."""
    shown: list[tuple[str, list[str]]] = []
    inside = False
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        if line.startswith("    $ "):
            shown.append((line.removeprefix("    $ "), []))
            inside = True
        elif inside and (line.startswith("    ") or not line):
            shown[-1][1].append(line.removeprefix("    "))
        else:
            inside = False
    for _, lines in shown:
        while lines and not lines[-1]:
            lines.pop()
    return shown


# Times, space, and how many headers of chunks each process happened to read.
_CHANGING = re.compile(r"\d+\.\d s with|\d+ GiB free|read \d+\.\d+ MiB")


def masked(lines: list[str]) -> list[str]:
    return [_CHANGING.sub("*", line) for line in lines]


def run(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    program, *arguments = shlex.split(command)
    if program == "megarl":
        # Errors exit.
        with contextlib.suppress(SystemExit):
            main(arguments)
    elif program == "python":
        script = REPOSITORY / arguments[0]
        monkeypatch.setattr(sys, "argv", [str(script), *arguments[1:]])
        runpy.run_path(str(script), run_name="__main__")
    else:
        subprocess.run([program, *arguments], check=True)


def test_the_page_shows_what_is_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    shown = transcripts()
    assert len(shown) == 5
    for command, expected in shown:
        run(command, monkeypatch)
        output = capsys.readouterr()
        errors = [line for line in output.err.splitlines() if line.startswith("error")]
        assert masked([*output.out.splitlines(), *errors]) == masked(expected), command
