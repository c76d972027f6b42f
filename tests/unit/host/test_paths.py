"""What a shell would have expanded is expanded in run files, overrides and arguments, and nothing else."""

import argparse
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from megarl.cli import main, parse
from megarl.config.load import load_config
from megarl.errors import ConfigError
from megarl.host.paths import expand_arguments, expanded

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


def _commands(parser: argparse.ArgumentParser, name: str = "") -> Iterator[tuple[str, argparse.ArgumentParser]]:
    nested = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    if not nested:
        yield name, parser
    for action in nested:
        for below, command in action.choices.items():
            yield from _commands(command, f"{name} {below}".strip())


def test_every_argument_of_every_command_is_read_as_a_shell_reads_a_word(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that are paths by their type, and texts that may be one; but not what other programs read."""
    found: list[argparse.ArgumentParser] = []

    def keep(parser: argparse.ArgumentParser, *_: object) -> None:
        found.append(parser)
        raise SystemExit

    monkeypatch.setattr(argparse.ArgumentParser, "parse_known_args", keep)
    with pytest.raises(SystemExit):
        parse([])
    forms = {"~/x": "/home/me/x", "$DATA/x": "/data/x", "${DATA}/x": "/data/x", "x/y": "x/y"}
    num_lists = 0
    for command, parser in _commands(found[0]):
        for action in parser._actions:
            if action.nargs == 0 or action.type not in (None, Path) or action.choices:
                continue
            if action.dest in ("overrides", "given", "argv"):
                continue
            is_list = action.nargs in ("*", "+")
            num_lists += is_list
            for given, expected in forms.items():
                one = Path(given) if action.type is Path else given
                arguments = expand_arguments(argparse.Namespace(**{action.dest: [one] if is_list else one}))
                (got,) = vars(arguments).values()
                assert str(got[0] if is_list else got) == expected, f"{command} {action.dest}"
    assert num_lists >= 5


# By command, its arguments with a file that is not there; {home} has a model and rows.
GONE = (
    "train {}.yaml",
    "sft {}.yaml",
    "train {home}/run.yaml model.path={}/m/n",
    "train {home}/run.yaml use.algo={}/m.yaml",
    "eval {} --data {home}/rows.jsonl --out {home}/out",
    "inspect-hints {}.yaml",
    "convert hf-to-mcore {} --out {home}/out",
    "convert mcore-to-hf {} --model {home} --out {home}/out",
    "convert dequantize {} --out {home}/out",
    "convert merge {} --adapter {home} --out {home}/out",
    "convert verify {} {home}",
    "convert-config {}.sh",
    "slurm submit --config {}.yaml --nodes 1 --time 1:00:00 --dry-run",
    "serve-reward --config {}.yaml",
    "serve-reward rewards.custom.path={}/m.py",
    "status {}",
    "report {}",
    "learning-curve {}",
    "explain-step {} 1",
    "compare-gradients {} 1 --save {home}/out",
    "trace {}",
    "plan-async {}",
    "study {}.yaml --check",
)
QUICK = {"status {}", "trace {}", "train {home}/run.yaml use.algo={}/m.yaml", "convert-config {}.sh"}


@pytest.mark.parametrize(
    "command", [each if each in QUICK else pytest.param(each, marks=pytest.mark.long) for each in GONE]
)
@pytest.mark.parametrize("form", ["~/gone", "$DATA/gone", "gone"])
def test_what_is_not_there_is_named_with_its_place(
    command: str, form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("DATA", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text("{use: {model: qwen3-tiny, algo: grpo}, data: {train: [rows.jsonl]}}")
    (tmp_path / "rows.jsonl").write_text("{}")
    with pytest.raises(SystemExit) as ended:
        main(command.replace("{home}", str(tmp_path)).replace("{}", form).split())
    assert ended.value.code in (1, 2)
    told = capsys.readouterr().err
    assert str(tmp_path) in told
    assert "gone" in told
    assert "~" not in told
    assert "$" not in told
