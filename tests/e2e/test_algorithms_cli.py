"""PPO and LUFFY through the command line, over two pipeline stages: critic and demonstrations included."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from megarl.record.metrics import RunPaths
from megarl.rollout.replay import read_record, record_path
from megarl.types import SegmentSource
from megarl_lab.recipes.tasks.generate import TaskFiles
from tests.e2e.algorithms import RUN, Result, check, write_prompts
from tests.e2e.support import REPOSITORY, RUN_FILE, tied_head
from tests.helpers.talk import talk_settings

PIPELINE = "actor.layout={tp: 1, pp: 2, sequence_parallel: false}"
# Such a run takes a minute, and ten where other work has the cores.
TIMEOUT_S = 900.0
pytestmark = pytest.mark.timeout(1200)


TALK = (*talk_settings(), "rollout.max_response_tokens=128", "rollout.record=true")


def three_steps(algorithm: str, model: Path, sums: TaskFiles, directory: Path, *settings: str) -> RunPaths:
    """A checked run of the command line."""
    prompts = write_prompts(sums, directory / "train.parquet")
    where = [f"run.dir={directory}", f"run.name={algorithm}", f"model.path={model}"]
    data = [f"data.train=[{prompts}]", f"use.algo={algorithm}"]
    # Not a part of the run that the tests themselves may have.
    environment = {key: value for key, value in os.environ.items() if key != "MEGARL_RUN_ID"}
    ended = subprocess.run(
        [sys.executable, "-m", "megarl.cli", "train", str(RUN_FILE), *RUN, *where, *data, *settings],
        cwd=REPOSITORY,
        env=environment,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    paths = RunPaths(directory / algorithm)
    check(Result(paths, model), algorithm)
    return paths


@tied_head
@pytest.mark.long
@pytest.mark.parametrize("algorithm", ["ppo", "luffy"])
def test_three_steps_over_two_stages(algorithm: str, model: Path, sums: TaskFiles, tmp_path: Path) -> None:
    assert three_steps(algorithm, model, sums, tmp_path, PIPELINE).report_html.is_file()


@tied_head
@pytest.mark.long
@pytest.mark.parametrize("algorithm", ["cpo", "luffy", "ppo", "turn_returns"])
def test_three_steps_on_conversations(algorithm: str, model: Path, sums: TaskFiles, tmp_path: Path) -> None:
    """With a hint in the forward pass alone, and with demonstrations that are the first turn or its beginning."""
    paths = three_steps(algorithm, model, sums, tmp_path, *TALK)
    samples = [sample for step in range(1, 4) for sample in read_record(record_path(paths.records, step)).samples]
    sources = [[segment.source for segment in sample.segments[1:]] for sample in samples]
    assert all(SegmentSource.ENVIRONMENT in each for each in sources)
    given = [each for each in sources if each[0] is SegmentSource.DEMONSTRATION]
    assert bool(given) == (algorithm == "luffy")
    # The environment replied to what a demonstration said.
    assert not given or any(each[1] is SegmentSource.ENVIRONMENT for each in given)


@tied_head
@pytest.mark.long
def test_three_steps_of_search(model: Path, sums: TaskFiles, tmp_path: Path) -> None:
    """A turn is tried three times, and two of the tries go on."""
    settings = (*talk_settings(kind="Search"), "rollout.max_response_tokens=128", "environment.max_tokens=400")
    paths = three_steps("tree_returns", model, sums, tmp_path, *settings, "rollout.record=true")
    for step in range(1, 4):
        for sample in read_record(record_path(paths.records, step)).samples:
            assert sample.episode is not None
            assert [each[:3] for each in sample.episode.tries] == [(0, 3, -1), (3, 1, 0), (4, 1, 1)]
            assert sample.episode.num_turns == 5
            seen = {segment.token_ids.tobytes() for segment in sample.segments[1:4:2]}
            assert len(seen) == 2
