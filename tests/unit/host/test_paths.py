"""What a shell would have expanded is expanded in run files, overrides and arguments, and nothing else."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from megarl.cli import main
from megarl.config.load import load_config
from megarl.errors import ConfigError
from megarl.host.paths import expanded

HOME = {"HOME": "/home/me", "DATA": "/data", "USER": "me"}


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in HOME.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("UNSET", raising=False)


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("~/runs", "/home/me/runs"),
        ("$DATA/a.parquet", "/data/a.parquet"),
        ("${DATA}/a", "/data/a"),
        ("/scratch/$USER/x-${USER}", "/scratch/me/x-me"),
        ("$DATA", "/data"),
        # No paths.
        *(
            (text, text)
            for text in ("~", "$x", "a~/b", "plain", "costs $5/kg, ~/ or so", "^/a$", "s3://u:pa$word@h/b", "")
        ),
    ],
)
def test_texts(text: str, path: str) -> None:
    assert expanded(text, "run.dir") == path


@pytest.mark.parametrize("text", ["$UNSET/a", "/a/${UNSET}", "$UNSET", "~nobody-has-this-name/a"])
def test_what_has_no_value_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"run\.dir: got '.*', but .*; .*write the path"):
        expanded(text, "run.dir")


def test_run_files_and_overrides(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("run: {name: a, dir: $DATA/runs}\ndata: {train: [~/a.parquet]}\n")
    config = load_config(file, ["model.path=~/model", 'rollout.stop=["~"]'])
    assert (config.run.dir, config.data.train, config.model.path) == (
        "/data/runs",
        ("/home/me/a.parquet",),
        "/home/me/model",
    )
    with pytest.raises(ConfigError, match=r"data\.val.*UNSET is not set"):
        load_config(file, ["data.val=[$UNSET/b.parquet]"])


def test_arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(SystemExit) as ended:
        main(["status", "~/nothing"])
    assert ended.value.code == 2
    assert f"error: {tmp_path}/nothing holds no run" in capsys.readouterr().err


def test_as_a_module() -> None:
    """Also by a Python that has nothing that megarl needs."""
    root = Path(__file__).parents[3]
    command = [sys.executable, "-m", "megarl", "--help"]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("usage: megarl")
    program = f"import runpy, sys; sys.path.insert(0, {str(root)!r}); runpy.run_module('megarl', run_name='__main__')"
    bare = [os.path.realpath(sys.executable), "-I", "-S", "-c", program, "status", "nothing"]
    done = subprocess.run(bare, capture_output=True, text=True, check=False, env={"PATH": ""})
    assert done.returncode == 1
    assert "cannot run megarl: No module named" in done.stderr
    assert "; use the Python of the environment in which megarl is installed" in done.stderr
    bare[-3] = f"import sys; sys.version_info = (3, 10, 13); {program}"
    done = subprocess.run(bare, capture_output=True, text=True, check=False, env={"PATH": ""})
    assert re.match(r"error: \S+ is Python \S+, but megarl needs 3.11 or later; use the Python of", done.stderr)


def test_as_a_module_where_a_file_has_the_name_of_pythons_own(tmp_path: Path) -> None:
    """`python -m` itself imports `warnings` before any code of megarl runs, and `types` if nothing has done so."""
    own = Path(os.__file__).with_name("warnings.py")
    (tmp_path / "warnings.py").write_bytes(own.read_bytes())
    (tmp_path / "secrets.py").write_text("raise ImportError('mine')\n")
    command = [sys.executable, "-m", "megarl", "--help"]
    environment = {"PATH": os.defpath, "PYTHONPATH": str(Path(__file__).parents[3])}
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 1
    assert done.stderr.startswith(f"error: {tmp_path}/warnings.py takes the place of Python's own module warnings; ")
    (tmp_path / "warnings.py").unlink()
    subprocess.run(command, cwd=tmp_path, capture_output=True, check=True, env=environment)
