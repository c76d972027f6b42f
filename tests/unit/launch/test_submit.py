"""Scripts that `megarl slurm submit` writes, and what it refuses."""

import re
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megarl.errors import ConfigError, WorkerError
from megarl.launch.submit import SubmitRequest, job_script, seconds_of, submit

REPOSITORY = Path(__file__).parents[3]
# 32 devices: TP 8, PP 2, DP 2.
REQUEST = SubmitRequest(
    command="train",
    config=REPOSITORY / "configs" / "run" / "gsm8k-qwen3-32b.yaml",
    overrides=("run.name=two words",),
    num_nodes=4,
    gpus_per_node=8,
    cpus_per_node=96,
    time_limit="2-00:00:00",
    signal_s=900,
    max_restarts=5,
    sbatch_options=("--partition=gpu", "--account=me"),
)


def test_a_script_has_the_options_and_quotes_the_arguments() -> None:
    script = job_script(REQUEST)
    for option in (
        "--nodes=4",
        "--gpus-per-node=8",
        "--cpus-per-task=96",
        "--time=2-00:00:00",
        "--signal=B:USR1@900",
        "--partition=gpu",
        "--account=me",
    ):
        assert script.count(f"#SBATCH {option}\n") == 1
    last = script.splitlines()[-1]
    assert last == (
        f"exec megarl slurm run --max-restarts=5 -- train {REQUEST.config} 'run.name=two words' "
        "placement.trainer.num_nodes=4 --resume"
    )
    assert subprocess.run(["bash", "-n"], input=script, text=True).returncode == 0


def test_nodes_without_gpus_ask_for_none() -> None:
    one = replace(REQUEST, config=REPOSITORY / "configs" / "run" / "sums-rl.yaml", num_nodes=1, gpus_per_node=0)
    assert "gpus-per-node" not in job_script(one)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"num_nodes": 3},
            "--nodes: got 3 with 8 GPUs each, but the run needs 32 GPUs (4 nodes) for placement.trainer; change",
        ),
        ({"num_nodes": 5}, "the 32 processes of placement.trainer do not divide evenly over 5 nodes"),
        ({"gpus_per_node": 4, "num_nodes": 8}, "actor.layout.tp: got 8, but a node has 4 GPUs"),
        ({"time_limit": "00:30:00"}, "--time: got 00:30:00 (1800 s), but the last checkpoint begins --signal-s=900 s"),
        ({"time_limit": "soon"}, "--time: got 'soon', expected Slurm's form"),
        ({"num_nodes": 0}, "expected at least 1"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_what_cannot_fit_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        job_script(replace(REQUEST, **change))


def test_split_placement_has_nodes_for_engines() -> None:
    """32 trainer GPUs on 4 nodes, 2 engines of 8 on 2 more."""
    split = ("placement.mode=split", "placement.offload=false", "rollout.engine.num_engines=2", "rollout.engine.tp=8")
    request = replace(REQUEST, overrides=split, num_nodes=6)
    assert "placement.trainer.num_nodes=4 placement.engines.num_nodes=2" in job_script(request)
    with pytest.raises(ConfigError, match=r"32 GPUs \(4 nodes\) for placement.trainer, 16 GPUs \(2 nodes\) for"):
        job_script(replace(request, num_nodes=4))


@pytest.mark.parametrize(
    ("limit", "seconds"),
    [
        ("90", 5400),
        ("01:30", 90),
        ("24:00:00", 86400),
        ("2-12", 216000),
        ("1-01:30", 91800),
        ("1-00:00:30", 86430),
    ],
)
def test_time_limits_as_slurm_reads_them(limit: str, seconds: int) -> None:
    assert seconds_of(limit) == seconds


def test_jobs_of_a_chain_wait_for_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = tmp_path / "log"
    _fake_sbatch(tmp_path, f'echo "$@" >> {log}; cat > /dev/null; echo $((40 + $(wc -l < {log})))')
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert submit(replace(REQUEST, num_jobs=3)) == [41, 42, 43]
    assert log.read_text().splitlines() == [
        "--parsable",
        "--parsable --dependency=afterany:41",
        "--parsable --dependency=afterany:42",
    ]


def test_what_slurm_refuses_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _fake_sbatch(tmp_path, "echo 'invalid partition specified: gpu' >&2; exit 1")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    with pytest.raises(WorkerError, match="sbatch refused the job: invalid partition specified: gpu"):
        submit(REQUEST)


def _fake_sbatch(directory: Path, body: str) -> None:
    script = directory / "sbatch"
    script.write_text(f"#!/bin/bash\n{body}\n")
    script.chmod(0o755)
