"""What a command prints reaches any terminal, and names any file, whatever the locale says."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

# As sys.argv is of a console script: the name of a file, with what the process says about it and about its children.
PROGRAM = """
import os, subprocess, sys
from megarl.host.streams import use_utf8_mode, escape_unencodable
use_utf8_mode()
escape_unencodable()
child = "import sys; print('child ×', sys.argv[1].strip('é'), sys.flags.utf8_mode)"
print("2×3", sys.argv[1], sys.getfilesystemencoding(), flush=True)
print("half \\ud83d", file=sys.stderr)
subprocess.run([sys.executable, "-c", child, sys.argv[1]], check=True)
"""
ASCII, LATIN = r"2\xd73 {}\xe9 utf-8|child \xd7 {} ", "2\xd73 {}\xe9 utf-8|child \xd7 {} "


@pytest.mark.parametrize(
    ("setting", "encoding", "said", "mode"),
    [
        ({"PYTHONIOENCODING": "ascii"}, "ascii", ASCII, 0),
        ({"PYTHONIOENCODING": "ascii:strict"}, "ascii", ASCII, 0),
        ({"PYTHONIOENCODING": "cp1252"}, "cp1252", LATIN, 0),
        # The locale C, where Python is kept from choosing UTF-8.
        ({"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}, "ascii", ASCII, 1),
        ({"LC_ALL": "C.UTF-8"}, "utf-8", LATIN, 0),
    ],
)
def test_a_command_says_everything_in_any_encoding(
    setting: dict[str, str], encoding: str, said: str, mode: int, tmp_path: Path
) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM, encoding="utf-8")
    kept = {name: value for name, value in os.environ.items() if name not in ("LANG", "LC_ALL", "PYTHONIOENCODING")}
    ended = subprocess.run(
        [sys.executable, program, "a.é".encode()],
        env={"LC_ALL": "C.UTF-8", **kept, **setting, "PYTHONPATH": str(Path(__file__).parents[3])},
        capture_output=True,
        check=True,
    )
    lines = ended.stdout.decode(encoding).splitlines()
    assert lines == [part + str(mode) * i for i, part in enumerate(said.format("a.", "a.").split("|"))]
    assert ended.stderr == b"half \\ud83d\n"


def test_a_name_that_is_no_text_can_be_said(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM, encoding="utf-8")
    ended = subprocess.run(
        [sys.executable, program, b"n\xff"],
        env={**os.environ, "PYTHONIOENCODING": "utf-8", "PYTHONPATH": str(Path(__file__).parents[3])},
        capture_output=True,
        check=True,
    )
    assert ended.stdout.decode().splitlines()[0] == r"2×3 n\udcff utf-8"


def test_streams_that_are_closed_lead_nowhere(tmp_path: Path) -> None:
    """No file gets their numbers, in which libraries and other processes would print."""
    program = (
        "import subprocess, sys\nfrom megarl.host.streams import escape_unencodable, print_lines\n"
        "escape_unencodable()\n"
        "print_lines('lost')\nwith open(sys.argv[1], 'w') as file:\n"
        "    subprocess.run([sys.executable, '-c', 'print(1)'], check=True)\n    file.write(str(file.fileno()))\n"
    )
    command = 'exec "$0" -c "$1" "$2" <&- >&- 2>&-'
    subprocess.run(["sh", "-c", command, sys.executable, program, tmp_path / "file"], check=True)
    assert int((tmp_path / "file").read_text()) > 2
