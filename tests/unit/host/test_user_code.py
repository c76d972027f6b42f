"""Which line of a user's file an error came from, in this process and in what another one wrote."""

import subprocess
import sys
import sysconfig
import traceback
from pathlib import Path

import pytest

from megarl.host.exit_codes import EXIT_FAILED, exit_on_errors
from megarl.host.user_code import note_user_file, place_in, place_of, run_file

# Line 4 calls the standard library, which calls line 7.
MINE = """import functools

def outer():
    return functools.reduce(inner, [1, 2])

def inner(a, b):
    raise ValueError("my own mistake")
"""


def test_the_deepest_line_of_the_user_is_named(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(MINE)
    module = run_file(path, "megarl_test_mine")
    with pytest.raises(ValueError, match="my own mistake") as raised:
        module.outer()
    assert place_of(raised.value) == place_in("".join(traceback.format_exception(raised.value))) == f"{path}:7"


def test_only_a_module_that_the_user_named_is_the_users_among_installed_packages() -> None:
    named, other = (Path(sysconfig.get_path("purelib")) / "a_package" / name for name in ("named.py", "other.py"))
    note_user_file(named)
    frame = '  File "{}", line {}, in work\n'
    assert place_in(frame.format(named, 3) + frame.format(other, 5)) == f"{named}:3"
    assert place_in(frame.format(other, 5)) == ""


def test_a_mistake_in_the_users_code_ends_a_command_with_its_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "mine.py"
    path.write_text(MINE)
    module = run_file(path, "megarl_test_mine")
    with pytest.raises(SystemExit) as left, exit_on_errors():
        module.outer()
    assert left.value.code == EXIT_FAILED
    assert capsys.readouterr().err.splitlines()[-1] == f"error: {path}:7: ValueError: my own mistake; correct it"


def test_an_error_of_megarl_alone_keeps_its_traceback() -> None:
    code = "from megarl.host.exit_codes import exit_on_errors\nwith exit_on_errors(): raise LookupError('internal')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stderr.splitlines()[-1] == "LookupError: internal"
