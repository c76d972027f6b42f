"""Every algorithm of configs/algo end to end: all in one live cluster, which starts each from the same weights."""

from pathlib import Path

import pytest

from megarl.cluster.cluster import Cluster
from megarl.config import load_config
from megarl.record.recorder import RunRecorder
from megarl.train.inputs import open_train_inputs
from megarl.train.wiring import build_trainer
from megarl_lab.recipes.tasks.generate import TaskFiles
from tests.e2e.algorithms import RUN, Result, check, write_prompts
from tests.e2e.support import REPOSITORY, RUN_FILE, tied_head
from tests.helpers.checkpoints import make_checkpoint

# Each of these runs stages or models that no other one does; `ppo_critic` begins with a run of `ppo`. The rest differs
# from them in pure functions, which unit tests cover, and is long.
QUICK = (
    "cpo",
    "dapo",
    "grpo",
    "luffy",
    "ppo_critic",
)
OVERRIDES = {
    "gdpo": ("algo.advantage.components.score=0.5",),
    # Fewer than the four samples of a prompt.
    "passk": ("algo.advantage.k=2",),
    # A group trains only if exactly one of its samples is right: half of the pairs, and a quarter of the fours.
    "passk_best": ("rollout.num_samples=2", "trainer.prompts_per_step=8"),
}
TAUGHT = ("gkd", "opd", "opd_exact")
ALGORITHMS = sorted(path.stem for path in (REPOSITORY / "configs" / "algo").glob("*.yaml"))
# Losses that no file chooses: the file that each goes on from, and what it changes.
VARIANTS = {
    "ctpo_geomean": ("ctpo", ("algo.policy_loss.name=ctpo_geomean",)),
    "dppo_top_kl": ("dppo_tv", ("algo.policy_loss.name=dppo_top_kl", "rollout.head_tokens=8")),
    "dppo_exact_kl": ("dppo_exact_tv", ("algo.policy_loss.name=dppo_top_kl", "trainer.num_epochs=2")),
}


@pytest.fixture(scope="module")
def prompts(sums: TaskFiles, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_prompts(sums, tmp_path_factory.mktemp("prompts") / "train.parquet")


class Machine:
    """A live cluster, and runs on it one after the other."""

    def __init__(self, cluster: Cluster, root: Path, model: Path, prompts: Path) -> None:
        self._cluster, self._root, self._model, self._prompts = cluster, root, model, prompts
        self.results: dict[str, Result] = {}

    def train(self, algorithm: str, name: str = "") -> "Result":
        """A run of three steps, from the start."""
        name = name or algorithm
        file, changes = VARIANTS.get(algorithm, (algorithm, ()))
        overrides = [*OVERRIDES.get(algorithm, ()), *changes]
        if algorithm == "ppo_critic":
            # Rewards from a frozen critic need one that was trained.
            critic = self.train("ppo", "critic").paths.export_critic
            overrides.append(f"critic.model_path={critic}")
        if algorithm in TAUGHT:
            teacher = self._root / "teacher"
            teacher = teacher if teacher.is_dir() else make_checkpoint(teacher, tied=True, seed=5)
            overrides.append(f"teacher.model_path={teacher}")
        where = [f"run.dir={self._root}", f"run.name={name}", f"model.path={self._model}"]
        data = [f"data.train=[{self._prompts}]", f"use.algo={file}"]
        config = load_config(RUN_FILE, [*RUN, *where, *data, *overrides])
        recorder = RunRecorder(config, overwrite=True)
        build_trainer(open_train_inputs(config), self._cluster, recorder).fit()
        self.results[name] = Result(recorder.paths, self._model)
        return self.results[name]


@pytest.fixture(scope="module")
def machine(cluster: Cluster, model: Path, prompts: Path, tmp_path_factory: pytest.TempPathFactory) -> Machine:
    return Machine(cluster, tmp_path_factory.mktemp("runs"), model, prompts)


@tied_head
@pytest.mark.parametrize(
    "algorithm", [pytest.param(name, marks=() if name in QUICK else pytest.mark.long) for name in ALGORITHMS]
)
def test_three_steps(machine: Machine, algorithm: str) -> None:
    check(machine.train(algorithm), algorithm)


@tied_head
@pytest.mark.long
@pytest.mark.parametrize("name", VARIANTS)
def test_three_steps_of_what_no_file_chooses(machine: Machine, name: str) -> None:
    check(machine.train(name), name)


@tied_head
def test_a_run_leaves_nothing_to_the_next_one(machine: Machine) -> None:
    """Also if a critic was trained in between."""
    if not {"grpo", "critic"} <= machine.results.keys():
        machine.train("grpo")
        machine.train("ppo", "critic")
    first, second = machine.results["grpo"], machine.train("grpo", "again")
    assert second.without_times == first.without_times
    assert second.largest_change == first.largest_change
