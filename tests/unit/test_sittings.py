"""Sittings on a GPU: they go on where the last one stopped, write tables, and their dry form runs on CPUs."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[1] / "gpu/sitting.sh"


def sit(block: str, out: Path, seconds: int = 480, *, dry: bool = True) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [SCRIPT, block, sys.executable, out, str(seconds)],
        capture_output=True,
        text=True,
        env={**os.environ, "SITTING_DRY": "1" if dry else ""},
    )


def test_a_sitting_goes_on_where_the_last_one_stopped(tmp_path: Path) -> None:
    """Steps that are there are not repeated; for the other there is no time, so the sitting is not over."""
    head, speed = {"exit": 0, "seconds": 17, "said": "wrote"}, {"exit": 0, "seconds": 60, "said": "wrote"}
    (tmp_path / "B.json").write_text(json.dumps({"head": head, "speed": speed}))
    done = sit("B", tmp_path, 5)
    assert (done.returncode, done.stdout.splitlines()[0]) == (3, "copies: for the next sitting")
    done = sit("B", tmp_path)
    assert done.returncode == 0, done.stderr
    steps = json.loads((tmp_path / "B.json").read_text())
    assert (list(steps), steps["head"], steps["copies"]["exit"]) == (["head", "speed", "copies"], head, 0)
    table = (tmp_path / "B.md").read_text().splitlines()
    assert table[2] == "| head | 0 | 17 | wrote |"
    assert table[4].startswith("| copies | 0 | ")


def test_a_step_that_fails_is_in_the_table(tmp_path: Path) -> None:
    (tmp_path / "B.json").write_text(
        json.dumps({name: {"exit": 0, "seconds": 1, "said": ""} for name in ("head", "speed")})
    )
    (tmp_path / "copies.json").mkdir()
    assert sit("B", tmp_path).returncode == 1
    assert json.loads((tmp_path / "B.json").read_text())["copies"]["exit"] == 1


def test_without_a_device_it_says_so(tmp_path: Path) -> None:
    done = sit("A", tmp_path / "out", dry=False)
    assert (done.returncode, (tmp_path / "out").exists()) == (2, False)
    assert done.stderr.endswith("torch finds no CUDA device; SITTING_DRY=1 takes CPUs\n")


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("block", ["A", "B", "C"])
def test_dry_sittings(block: str, tmp_path: Path) -> None:
    done = sit(block, tmp_path)
    assert done.returncode == 0, done.stdout
    assert {each["exit"] for each in json.loads((tmp_path / f"{block}.json").read_text()).values()} == {0}
