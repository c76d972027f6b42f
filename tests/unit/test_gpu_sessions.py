"""The scripts of tests/gpu: each test file has its session, none passes without a device, files are carried whole."""

import re
import subprocess
import sys
from pathlib import Path

GPU = Path(__file__).resolve().parents[1] / "gpu"
SESSIONS = sorted(GPU.glob("session_*.sh"))
MIB = 1 << 20


def test_every_file_of_tests_belongs_to_one_session() -> None:
    named = [name for script in SESSIONS for name in re.findall(r"tests/gpu/(test_\w+\.py)", script.read_text())]
    assert sorted(named) == sorted(path.name for path in GPU.glob("test_*.py"))


def test_no_session_takes_more_than_15_minutes() -> None:
    """By what their headers promise; the time of a session as a whole ends a step that hangs."""
    promised = [re.search(r"of about (\d+) minutes", script.read_text()) for script in SESSIONS]
    assert [int(found[1]) for found in promised if found] == [8, 12]


def test_a_session_without_a_device_says_so(tmp_path: Path) -> None:
    done = subprocess.run([SESSIONS[0], sys.executable, tmp_path / "out"], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.endswith("torch finds no CUDA device, so every test would be skipped\n")
    assert not (tmp_path / "out").exists()


def test_steps_end_in_time_or_say_why_they_were_not_run(tmp_path: Path) -> None:
    """On a pretended device: what passes, fails, lacks a package, hangs, and comes after the time is over."""
    script = tmp_path / "session.sh"
    script.write_text(
        f"""source {GPU / "session.sh"}
        step good 60 echo done
        show 1
        step bad 60 sh -c 'echo broken; exit 3'
        requires "json no_such_module" step without 60 echo never
        requires json step with 60 echo done
        budget=$((SECONDS + 21))
        step hangs 1 sleep 60
        budget=$SECONDS
        step late 60 echo never
        finish
        """
    )
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\ncase "$2" in *is_available*) ;; *) exec {sys.executable} "$@" ;; esac\n')
    python.chmod(0o755)
    done = subprocess.run(["bash", script, python, tmp_path / "out"], capture_output=True, text=True, cwd=tmp_path)
    summary = (tmp_path / "out/summary.txt").read_text()
    assert done.returncode == 1
    assert done.stdout == f"{summary}\ndone\n\n{summary}"
    assert [line.split(maxsplit=1)[0] for line in summary.splitlines()] == [
        *("good", "bad", "without", "with", "hangs", "late")
    ]
    assert [re.search(r"exit +(\d+)", line)[1] for line in summary.splitlines() if "exit" in line] == [
        *("0", "3", "0", "124")
    ]
    assert "skipped: the environment has no no_such_module" in summary
    assert re.search("late +not run: [0-9]+ s are over", summary)
    assert "=== bad\nbroken\n" in (tmp_path / "out/log.txt").read_text()


def test_an_environment_is_carried_in_small_files(tmp_path: Path) -> None:
    venv, parts, there = tmp_path / "venv", tmp_path / "parts", tmp_path / "there"
    (venv / "bin").mkdir(parents=True)
    (venv / "bin/python").write_text("#!/bin/sh\n")
    (venv / "bin/python").chmod(0o755)
    with (venv / "large").open("wb") as file:
        file.truncate(60 * MIB)
    subprocess.run([GPU / "carry.sh", "pack", venv, parts], check=True)
    assert len(list(parts.glob("venv.tar.*"))) == 2
    assert all(part.stat().st_size <= 57 * MIB for part in parts.iterdir())
    venv.rename(tmp_path / "elsewhere")
    there.mkdir()
    subprocess.run([GPU / "carry.sh", "unpack", parts], check=True, cwd=there)
    assert (venv / "large").stat().st_size == 60 * MIB
    assert (there / "megarl/megarl/__init__.py").is_file()
    with next(parts.glob("megarl.tar.*")).open("r+b") as file:
        file.write(b"x")
    broken = subprocess.run([GPU / "carry.sh", "unpack", parts], capture_output=True, text=True, cwd=there)
    assert broken.returncode != 0
