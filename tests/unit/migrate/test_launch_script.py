"""What bash tells of a launch script is right or not known: nothing that the machine decides is guessed."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from megarl.errors import ConfigError
from megarl.migrate import launch_script
from megarl.migrate.convert_config import PeerOptions, read_peer_file

_START = "python3 -m verl.trainer.main_ppo"


def _read(tmp_path: Path, text: str, given: Sequence[str] = (), *, run_anyway: bool = False) -> PeerOptions:
    script = tmp_path / "run.sh"
    script.write_text(text)
    return read_peer_file(script, given, run_anyway=run_anyway)


@pytest.mark.parametrize(
    "text",
    [
        # Both ways of a condition about a file, about the scheduler, about a program.
        "A=1; if [ -f x ]; then A=2; fi",
        "A=1; [[ -d /data ]] && A=2",
        "A=1; [[ $SLURM_NNODES -gt 1 ]] && A=2",
        "A=1; (( SLURM_NNODES > 1 )) && A=2",
        "A=1; if nvidia-smi; then A=2; elif [ -d y ]; then A=3; fi",
        "L=1; test -e x || L=2; A=$L",
        "A=${SLURM_NNODES:-1}",
        "A=$((NODES * 8))",
        # What programs print, and what follows from it.
        "A=$(nproc)",
        "A=$((8 / $(nproc)))",
        "A=`hostname | cut -c1-3`",
        "A=$RANDOM",
        "X=$(echo $USER/x); A=${X%/*}",
        "A=$(python3 -c 'import x' && echo npu || echo gpu); case $A in npu) ;; gpu) ;; *) exit 1 ;; esac",
        "for f in $(ls); do A=$f; done",
        "A=0; while pgrep x; do A=$((A + 1)); done",
        # Files that are not here.
        "read A < file",
        "A=$(<file)",
        "A=$(cat args.txt)",
        # Variables that nobody sets.
        "A=$NONE/x",
        "B=${B}; A=$B",
        "A=${NEEDED:?give it}",
    ],
)
def test_what_the_machine_decides_is_not_known(text: str, tmp_path: Path) -> None:
    peer = _read(tmp_path, f"{text}\n{_START} trainer.x=$A trainer.y=1\n")
    assert dict(peer.options) == {"trainer.y": 1}
    assert peer.undecided == {"trainer.x"}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("if [ -f x ]; then A=2; else A=2; fi", 2),
        ("case $HOME in /*) ;; esac; A=1", 1),
        ("A=$(( ((2 + 3)) * 2 )); [[ $A == 1* ]] && A=7", 7),
        ("mkdir -p logs/$A; exec > >(tee logs/x) 2>&1; A=3", 3),
        ("set -euo pipefail\n. ./none.sh\nulimit -n 65535\ncd /none/x\nkill -9 1\nA=4", 4),
        ('B=/a/b/c.sh; A=$(basename "$B" .sh)', "c"),
        ('A="$(cd /none/x/.. && pwd)"', "/none"),
        ("A=$(cat <<EOF\n5\nEOF\n)", 5),
        ("A=$(seq 2 3 | tee log | { read x; echo $x; })", 2),
        ("echo a > /data/out/x; : > relative/y; A=6", 6),
    ],
)
def test_what_the_script_decides_is_known(text: str, expected: object, tmp_path: Path) -> None:
    assert _read(tmp_path, f"{text}\n{_START} trainer.x=$A").options == {"trainer.x": expected}


def test_open_files_of_the_process_that_reads_a_script_are_not_the_scripts(tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\x00")
    with (tmp_path / "binary").open("rb") as file:
        text = f". /dev/fd/{file.fileno()}\n. /proc/self/fd/{file.fileno()}\nA=3\n{_START} trainer.x=$A"
        assert _read(tmp_path, text).options == {"trainer.x": 3}


@pytest.mark.parametrize(
    "command",
    [
        "/opt/conda/bin/python3 -m verl.trainer.main_ppo",
        "$HOME/bin/python3 -m verl.trainer.main_ppo",
        'PY=/usr/bin/python3; "$PY" -m verl.trainer.main_ppo',
        f"exec {_START}",
        f"command {_START}",
        f"bash -c '{_START} \"$@\"' zero",
        f"nohup env A=b {_START}",
    ],
)
def test_ways_to_start(command: str, tmp_path: Path) -> None:
    assert _read(tmp_path, f"{command} trainer.x=1 > /logs/log 2>&1").options == {"trainer.x": 1}


def test_a_name_that_is_not_known_may_be_any(tmp_path: Path) -> None:
    peer = _read(tmp_path, f"{_START} trainer.$(hostname)=1 trainer.aime2024=2\n")
    assert peer.options == {"trainer.aime2024": 2}
    assert "may set any option" in peer.unreadable["trainer.$(hostname)"]


def test_files_beside_the_script_are_read(tmp_path: Path) -> None:
    (tmp_path / "model.sh").write_text('ARGS=(trainer.x=4)\nHERE="${BASH_SOURCE[0]}"\n')
    (tmp_path / "inner.sh").write_text(f"{_START} trainer.a=${{A}} trainer.b=${{B:-unset}} $@\n")
    text = 'D="$(cd "$(dirname "$0")" && pwd)"; source "$D/model.sh"; export A=1; B=2\n'
    peer = _read(tmp_path, f'{text}bash "$D/inner.sh" "${{ARGS[@]}}" trainer.here="$HERE"')
    assert peer.options == {
        "trainer.a": 1,
        "trainer.b": "unset",
        "trainer.x": 4,
        "trainer.here": f"{tmp_path}/model.sh",
    }


_OPTIONS = ("trainer.x=1", "trainer.y=2")


@pytest.mark.parametrize(
    ("text", "named"),
    [
        (f"{_START} trainer.x=1 \\\n# trainer.z=3 \\\ntrainer.y=2", "trainer.y=2"),
        (f"{_START} trainer.x=1\n  trainer.y=2 \\\n  trainer.z=3", "trainer.y=2 trainer.z=3"),
        (f"{_START} trainer.x=1 \\\n\n+trainer.y=2", "+trainer.y=2"),
        (f"{_START} trainer.x=1 \\ \ntrainer.y=2", "trainer.y=2"),
        ("python3 -m openrlhf.cli.train_ppo_ray --pretrain m\n  --y 2", "--y 2"),
    ],
)
def test_an_option_that_was_cut_off_is_named(text: str, named: str, tmp_path: Path) -> None:
    peer = _read(tmp_path, text)
    assert "trainer.y" not in peer.options
    assert "a command of its own" in peer.unreadable[named]


def test_arguments_have_hydra_s_meanings(tmp_path: Path) -> None:
    arguments = "~a.kl ++a.lr=3e-6 +a.n=8 a.epochs=1_0 a.project=on a.sweep=1,2 a.map={b:1} a.kl_coef@x=0123 bare"
    peer = _read(tmp_path, f"{_START} {arguments}")
    expected = {"a.lr": 3e-6, "a.n": 8, "a.epochs": 10, "a.project": "on", "a.map": {"b": 1}, "a.kl_coef": "0123"}
    assert peer.options == expected
    assert peer.undecided == {"a.kl", "a.sweep", "bare"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (f"{_START} trainer.x=1\r\n", "end as on Windows"),
        (f"if true; then\n{_START}\n", "line 3: syntax error"),
        ("python3 train_async.py --actor-num-nodes 1", "slime or vime"),
        (f"while :; do :; done; {_START}", "runs for more than 1 s"),
        ("".join(f"[ -f {n} ] && A{n}=1\n" for n in range(40)) + _START, "more than 30 ways"),
    ],
)
def test_what_cannot_be_read_is_refused_in_one_line(
    text: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch_script, "SECONDS", 1 if "1 s" in message else 60)
    monkeypatch.setattr(launch_script, "MAX_RUNS", 60)
    with pytest.raises(ConfigError, match=message) as raised:
        _read(tmp_path, text)
    assert "\n" not in str(raised.value)


def test_without_a_sandbox_a_script_runs_only_when_told_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise ConfigError("rewards.code.isolation=namespaces: this machine isolates no programs: none; or set x")

    monkeypatch.setattr(launch_script.Sandbox, "program", refuse)
    monkeypatch.setenv("SECRET", "s3cret")
    text = '[[ -f x ]] && A=2; D=$(dirname "${BASH_SOURCE[0]}")\n'
    text += f"{_START} trainer.d=$D trainer.a=${{A:-1}} trainer.s=$SECRET"
    with pytest.raises(ConfigError, match="--run-script"):
        _read(tmp_path, text)
    peer = _read(tmp_path, text, run_anyway=True)
    assert peer.options == {"trainer.d": str(tmp_path)}
    assert peer.undecided == {"trainer.a", "trainer.s"}


def test_a_script_reaches_nothing_of_this_machine(tmp_path: Path) -> None:
    (tmp_path / "private").write_text("x")
    target = tmp_path / "written"
    text = f"echo x > {target}; A=no; for f in {tmp_path}/*; do A=$f; done; {_START} trainer.x=$A"
    assert _read(tmp_path, text).options == {"trainer.x": f"{tmp_path}/written"}
    assert not target.exists()
