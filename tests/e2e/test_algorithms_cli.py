"""PPO and LUFFY through the command line, over two pipeline stages: critic and demonstrations included."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from megarl.data.tasks.generate import TaskFiles
from megarl.record.metrics import RunPaths
from tests.e2e.algorithms import RUN, Result, check, write_prompts
from tests.e2e.support import REPOSITORY, RUN_FILE, tied_head

PIPELINE = "actor.layout={tp: 1, pp: 2, sequence_parallel: false}"
TIMEOUT_S = 240.0


@tied_head
@pytest.mark.long
@pytest.mark.parametrize("algorithm", ["ppo", "luffy"])
def test_three_steps_over_two_stages(algorithm: str, model: Path, sums: TaskFiles, tmp_path: Path) -> None:
    prompts = write_prompts(sums, tmp_path / "train.parquet")
    where = [f"run.dir={tmp_path}", f"run.name={algorithm}", f"model.path={model}"]
    data = [f"data.train=[{prompts}]", f"use.algo={algorithm}"]
    # Not a part of the run that the tests themselves may have.
    environment = {key: value for key, value in os.environ.items() if key != "MEGARL_RUN_ID"}
    ended = subprocess.run(
        [sys.executable, "-m", "megarl.cli", "train", str(RUN_FILE), *RUN, *where, *data, PIPELINE],
        cwd=REPOSITORY,
        env=environment,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    paths = RunPaths(tmp_path / algorithm)
    check(Result(paths, model), algorithm)
    assert paths.report_html.is_file()
