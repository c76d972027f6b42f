"""The log-prob benchmark itself at a small size: counts by hand, values against float64, nothing left behind."""

import importlib.util
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
ROWS, HIDDEN = 1024, 32
HAS_LIGER = importlib.util.find_spec("liger_kernel") or (Path(sys.prefix) / "kernels" / "liger_kernel").is_dir()


def run_bench(out: Path, *contenders: str, options: Sequence[str] = ()) -> tuple[dict[str, Any], str]:
    sizes = f"--vocab 2048 --rows {ROWS} --hidden {HIDDEN} --timed-rows {ROWS} --rounds 2".split()
    settings = [*sizes, *options, "--contenders", *contenders]
    command = [sys.executable, "-m", "megarl_lab.bench.logprobs", "--out", str(out), *settings]
    # Times at this size decide the exit code, and mean nothing.
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode in (0, 1), done.stderr
    assert (out / "memory.png").stat().st_size > 0, done.stderr
    return json.loads((out / "records.json").read_text(encoding="utf-8")), done.stdout


def by_name(report: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {each["contender"]: each for each in report["measurements"]}


def assert_agrees(report: dict[str, Any], *contenders: str) -> None:
    assert [each["contender"] for each in report["agreements"]] == list(contenders)
    for each in report["agreements"]:
        assert set(each["differences"]) == {"log-prob", "entropy", "hidden gradient", "weight gradient"}
        assert all(0 <= difference <= 1e-5 for difference in each["differences"].values()), each


@pytest.mark.long
def test_head_beside_megatron(tmp_path: Path) -> None:
    contenders = ("recompute", "in_chunk", "megatron_verl")
    report, printed = run_bench(tmp_path, *contenders, options=["--main-grad"])
    assert_agrees(report, *contenders)
    found = by_name(report)
    assert set(found) == set(contenders)
    gradient_bytes = ROWS * HIDDEN * 4
    # Three float32 statistics a row in one collective.
    assert found["recompute"]["forward"] == {"num_collectives": 1, "num_bytes": 12 * ROWS}
    # Maximum, sum and label's logit for the loss; maximum, sum and mean for the entropy.
    assert found["megatron_verl"]["forward"] == {"num_collectives": 6, "num_bytes": 24 * ROWS}
    # The hidden gradient once, as a whole or in chunks.
    assert found["megatron_verl"]["backward"] == {"num_collectives": 1, "num_bytes": gradient_bytes}
    assert found["recompute"]["backward"]["num_bytes"] == gradient_bytes
    # All of it in forward.
    assert found["in_chunk"]["backward"] == {"num_collectives": 0, "num_bytes": 0}
    assert found["in_chunk"]["forward"]["num_bytes"] == 12 * ROWS + gradient_bytes
    for each in found.values():
        assert len(each["forward_s"]) == len(each["total_s"]) == 2
        assert all(0 < f <= t for f, t in zip(each["forward_s"], each["total_s"], strict=True))
        # A gradient of the logits of 64 rows at least, and less than a process.
        assert 4 * 64 * 1024 <= each["memory_bytes"] < 100 << 20
    # Logits of its shard thrice: [1024, 1024] float32 are 4 MiB.
    assert found["megatron_verl"]["memory_bytes"] >= 12 << 20
    assert "collectives in forward, recompute and keep" in printed


@pytest.mark.long
@pytest.mark.skipif(not HAS_LIGER, reason="liger-kernel is not installed; on CUDA and for comparisons it can be")
def test_liger(tmp_path: Path) -> None:
    report, _ = run_bench(tmp_path, "liger_fallback")
    assert_agrees(report, "liger_fallback")
    # Two collectives for each of two chunks of 512 rows: the maximum, then sum, mean and label's logit.
    assert by_name(report)["liger_fallback"]["forward"] == {"num_collectives": 4, "num_bytes": 16 * ROWS}


@pytest.mark.long
@pytest.mark.skipif(bool(importlib.util.find_spec("liger_kernel")), reason="liger-kernel is not missing")
def test_a_missing_package_is_named(tmp_path: Path) -> None:
    """Before anything is measured or written."""
    options = ["--out", str(tmp_path / "out"), "--kernels", str(tmp_path), "--contenders", "liger_fallback"]
    command = [sys.executable, "-m", "megarl_lab.bench.logprobs", *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert (
        "error: liger_fallback cannot be imported (ModuleNotFoundError: No module named 'liger_kernel')" in done.stderr
    )
    assert not (tmp_path / "out").exists()
