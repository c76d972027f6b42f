"""Every algorithm of configs/algo end to end: all in one live cluster, which starts each from the same weights."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from megarl.cluster import Cluster
from megarl.config import load_config
from megarl.config.schema import Config
from megarl.data.tasks.generate import TaskFiles
from megarl.record.recorder import RunRecorder
from megarl.train.inputs import open_train_inputs
from megarl.train.wiring import build_trainer
from tests.e2e.algorithms import RUN, Result, check, write_prompts
from tests.e2e.support import REPOSITORY, RUN_FILE, tied_head
from tests.helpers.rank_pool import RankPool

ALGORITHMS = sorted(path.stem for path in (REPOSITORY / "configs" / "algo").glob("*.yaml"))


@pytest.fixture(scope="module")
def prompts(sums: TaskFiles, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_prompts(sums, tmp_path_factory.mktemp("prompts") / "train.parquet")


class Machine:
    """A live cluster, and runs on it one after the other."""

    def __init__(self, root: Path, model: Path, prompts: Path, *overrides: str) -> None:
        self._root, self._model, self._prompts, self._overrides = root, model, prompts, overrides
        self.cluster = Cluster(self.config("grpo", "first"))

    def config(self, algorithm: str, name: str, *overrides: str) -> Config:
        where = [f"run.dir={self._root}", f"run.name={name}", f"model.path={self._model}"]
        data = [f"data.train=[{self._prompts}]", f"use.algo={algorithm}"]
        return load_config(RUN_FILE, [*RUN, *where, *data, *self._overrides, *overrides])

    def train(self, algorithm: str, name: str = "") -> "Result":
        """A run of three steps, from the start."""
        overrides = []
        if algorithm == "ppo_critic":
            # Rewards from a frozen critic need one that was trained.
            critic = self.train("ppo", "critic").paths.export_critic
            overrides.append(f"critic.model_path={critic}")
        config = self.config(algorithm, name or algorithm, *overrides)
        recorder = RunRecorder(config, overwrite=True)
        build_trainer(open_train_inputs(config), self.cluster, recorder).fit()
        return Result(recorder.paths, self._model)


@pytest.fixture(scope="module")
def machine(
    model: Path, prompts: Path, engine_process: RankPool, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Machine]:
    machine = Machine(tmp_path_factory.mktemp("runs"), model, prompts)
    with machine.cluster:
        yield machine


@tied_head
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_three_steps(machine: Machine, algorithm: str) -> None:
    check(machine.train(algorithm), algorithm)


@tied_head
def test_a_run_leaves_nothing_to_the_next_one(machine: Machine) -> None:
    first = machine.train("grpo", "again-1")
    machine.train("ppo", "between")
    second = machine.train("grpo", "again-2")
    assert second.without_times == first.without_times
    assert second.largest_change == first.largest_change
