"""Colocated and split, one engine and two, tensor-parallel engines, several hosts, offloading: the same training."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import psutil
import pytest

from megarl.host.janitor import RunScope
from megarl.record.metrics import read_metrics
from megarl.rollout.replay import read_record, record_path
from megarl_lab.recipes.tasks import TASKS
from megarl_lab.recipes.tasks.generate import GenerateConfig, generate
from tests.helpers.checkpoints import make_checkpoint
from tests.helpers.waiting import wait_until

REPOSITORY = Path(__file__).parents[2]
# float32 rounding of two implementations; wrong or stale weights are off by 1e-2 and more.
NATS = 1e-5
MOVED_NATS = 1e-2
RUN_TIMEOUT_S = 240
GONE_TIMEOUT_S = 20
SETTINGS = (
    "data.val=[]",
    "data.max_prompt_tokens=64",
    "rollout.max_response_tokens=16",
    "rollout.num_samples=4",
    "rollout.record=true",
    "rollout.engine.max_num_seqs=32",
    "trainer.total_steps=2",
    "trainer.prompts_per_step=6",
    # Random answers earn nothing; the bonus is what moves the weights.
    "algo.entropy_coef=0.1",
    "actor.optimizer.lr=0.003",
    "actor.optimizer.warmup_steps=0",
    # A reference too.
    "algo.kl.where=loss",
    "sync.verify=true",
    "logging.tensorboard=false",
)
STEP_1 = """
    workers.offload actor params
    engines.wake kv_cache
    engines.flush
    engines.sleep
    workers.onload reference params
    workers.forward reference
    workers.offload reference params
    workers.onload actor params
    workers.forward actor
    workers.onload actor grads+optimizer
    workers.update
"""
# Without the first step's comparison of log-probs the actor has no forward pass before its update.
STEP_2 = STEP_1.replace("    workers.onload actor params\n    workers.forward actor\n", "").replace(
    "onload actor grads+optimizer", "onload actor grads+optimizer+params"
)
AFTER_UPDATE = """
    workers.offload actor grads+optimizer
    engines.wake weights
    bridge.push
"""
CALLS_WITH_OFFLOAD = f"""
    engines.sleep
    workers.load
    workers.offload actor grads+optimizer
    workers.offload reference params
    engines.wake weights
    bridge.push
    {STEP_1} {AFTER_UPDATE} {STEP_2} {AFTER_UPDATE}
    engines.sleep
    workers.onload actor optimizer
    workers.offload actor optimizer
    workers.store_weights
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Files:
    """What all runs read, and where they write."""

    directory: Path
    model: Path
    train: Path

    def settings(self, name: str, *more: str) -> list[str]:
        here = [f"run.dir={self.directory}", f"run.name={name}", f"model.path={self.model}"]
        return [*SETTINGS, *here, f"data.train=[{self.train}]", *more]

    def run_dir(self, name: str) -> Path:
        return self.directory / name


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    directory = tmp_path_factory.mktemp("placement")
    data = generate(TASKS.get("sums"), directory / "data", GenerateConfig(seed=0, num_sft=4, num_train=16, num_val=4))
    return Files(directory=directory, model=make_checkpoint(directory / "model", tied=True), train=data.train)


@contextmanager
def started(files: Files, name: str, settings: Sequence[str], **job: bool) -> Iterator[Callable[[], dict]]:
    """A run in a process of its own; calling the result waits for its report."""
    report, job_file = files.directory / f"{name}.json", files.directory / f"{name}.job"
    job_file.write_text(json.dumps({"settings": files.settings(name, *settings), "report": str(report), **job}))
    log = files.directory / f"{name}.log"
    with log.open("w") as output:
        process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", "tests.e2e.placement_run", str(job_file)],
            cwd=REPOSITORY,
            env={**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"},
            stdout=output,
            stderr=subprocess.STDOUT,
        )

    def wait_for_report() -> dict:
        what, tail = f"the report of {name}", lambda: log.read_text()[-4000:]
        wait_until(report.exists, what, timeout_s=RUN_TIMEOUT_S, seen=tail, process=process)
        return {**json.loads(report.read_text()), "driver": process.pid}

    try:
        yield wait_for_report
    finally:
        if not job.get("wait"):
            process.wait(RUN_TIMEOUT_S)
        process.kill()
        process.wait()


def completed(files: Files, name: str, *settings: str) -> dict:
    """The report of a run that ended by itself and left nothing behind."""
    with started(files, name, settings) as report:
        seen = report()
    assert still_alive(seen["pids"].values()) == []
    assert RunScope(run_id=seen["run_id"]).leftovers() == []
    return seen


def assert_synced(seen: dict, *, num_engines: int) -> None:
    """Every engine agrees with the trainer after each of three syncs, between which the weights moved."""
    trainer, engines = np.array(seen["trainer_logprobs"]), np.array(seen["engine_logprobs"])
    assert engines.shape[:2] == (3, num_engines)
    assert np.abs(engines - trainer[:, None]).max() <= NATS
    assert np.abs(np.diff(trainer, axis=0)).max(axis=1).min() > MOVED_NATS


def still_alive(pids: Sequence[int]) -> list[int]:
    return [p for p in pids if psutil.pid_exists(p) and psutil.Process(p).status() != psutil.STATUS_ZOMBIE]


def wait_for_ends(pids: Sequence[int]) -> None:
    left = partial(still_alive, pids)
    wait_until(lambda: not left(), f"the ends of {pids}", timeout_s=GONE_TIMEOUT_S, seen=left)


def sampled_tokens(files: Files, name: str) -> dict[tuple[int, str, int], list[int]]:
    """(step, prompt, sample) → what was sampled."""
    return {
        (step, sample.uid, sample.sample_index): sample.response_token_ids.tolist()
        for step in (1, 2)
        for sample in read_record(record_path(files.run_dir(name) / "records", step)).samples
    }


def metrics_of(files: Files, name: str) -> list[Mapping[str, float]]:
    """Of both steps."""
    records = read_metrics(files.run_dir(name) / "metrics.jsonl")
    assert [record.step for record in records] == [1, 2]
    return [record.metrics for record in records]


@pytest.fixture(scope="module")
def two_engines(files: Files) -> dict:
    """A run on two colocated engines."""
    # Samples that move would be others than those of one engine.
    return completed(files, "two-engines", "rollout.engine.num_engines=2", "rollout.schedule.routing=in_turns")


@pytest.mark.long
def test_both_colocated_engines_have_the_trainers_weights_after_every_sync(two_engines: dict) -> None:
    assert_synced(two_engines, num_engines=2)
    assert "engine 1" in two_engines["pids"]


@pytest.mark.long
def test_offloading_one_engine_trains_on_the_same_samples_with_the_same_result(files: Files, two_engines: dict) -> None:
    seen = completed(files, "offloading", "placement.offload=true")
    assert_synced(seen, num_engines=1)
    assert seen["calls"] == [line.strip() for line in CALLS_WITH_OFFLOAD.splitlines() if line.strip()]
    # Samples do not depend on the number of engines, nor training on where memory was in between.
    assert sampled_tokens(files, "offloading") == sampled_tokens(files, "two-engines")
    for ours, theirs in zip(metrics_of(files, "offloading"), metrics_of(files, "two-engines"), strict=True):
        for name in ("actor/loss", "actor/grad_norm", "critic/score/mean"):
            assert ours[name] == pytest.approx(theirs[name], rel=1e-6)
        assert ours["memory/offloaded_gib/actor"] > ours["memory/offloaded_gib/reference"] > 0
    assert not any(call.split()[0] in {"workers.offload", "engines.sleep"} for call in two_engines["calls"])


# Weights whose gradient is noise would otherwise move by ±lr, in each layout otherwise.
PPO = ("use.algo=ppo", "critic.optimizer.lr=0.003", "critic.optimizer.eps=1e-4", "actor.optimizer.eps=1e-4")


@pytest.mark.long
def test_layouts_of_their_own_for_reference_and_critic_train_to_the_same_result(files: Files) -> None:
    """Three groups of ranks take turns on the devices; all three roles in one group are what that is compared with."""
    completed(files, "together", *PPO)
    layouts = ("reference.layout={dp: 2}", "critic.layout={pp: 2}", "placement.offload=true")
    seen = completed(files, "apart", *PPO, *layouts)
    assert_synced(seen, num_engines=1)
    assert {"trainer rank 1", "reference rank 1", "critic rank 1", "engine 0"} <= seen["pids"].keys()
    assert sampled_tokens(files, "apart") == sampled_tokens(files, "together")
    for ours, theirs in zip(metrics_of(files, "apart"), metrics_of(files, "together"), strict=True):
        assert ours["memory/offloaded_gib/critic"] > ours["memory/offloaded_gib/reference"] > 0
        for name in ("actor/grad_norm", "critic/loss", "critic/grad_norm", "critic/vpred_mean"):
            assert ours[name] == pytest.approx(theirs[name], rel=1e-4, abs=1e-6)
        for name in ("actor/loss", "actor/ref_kl"):
            assert ours[name] == pytest.approx(theirs[name], abs=1e-5)
    for name in ("export", "export_critic"):
        assert (files.run_dir("apart") / name / "model.safetensors").is_file()


@pytest.mark.long
def test_split_tensor_parallel_engines_on_other_hosts_are_synced_and_end_with_their_parents(files: Files) -> None:
    """No rank and no engine shares memory with another, as on different hosts."""
    settings = ["placement.mode=split", "rollout.engine.num_engines=2", "rollout.engine.tp=2"]
    with started(files, "split", settings, pretend_hosts=True, wait=True) as report:
        seen = report()
        assert_synced(seen, num_engines=2)
        scope, pids = RunScope(run_id=seen["run_id"]), seen["pids"]
        first, second = ([pids[f"engine {i} worker {rank}"] for rank in range(2)] for i in range(2))
        assert len({*pids.values()}) == 2 + 2 + 4
        # The janitor knows them by the environment that they inherited.
        assert {*first, *second} <= set(scope.processes())
        os.kill(pids["engine 0"], signal.SIGKILL)
        wait_for_ends(first)
        assert still_alive(second) == second
        os.kill(seen["driver"], signal.SIGKILL)
        wait_for_ends([*pids.values()])

        def left() -> list[object]:
            return [*scope.processes(), *scope.leftovers()]

        wait_until(lambda: not left(), "the clean-up", timeout_s=GONE_TIMEOUT_S, seen=left)


@pytest.mark.long
@pytest.mark.parametrize(
    ("mode", "num_engines", "tp"), [("colocated", 1, 2), ("colocated", 2, 2), ("split", 2, 1), ("split", 1, 2)]
)
def test_engines_are_synced_wherever_they_are(files: Files, mode: str, num_engines: int, tp: int) -> None:
    """The tests above and those of `test_run_layouts.py` have the other four."""
    name = f"{mode}-{num_engines}x{tp}"
    # Colocated engines need as many ranks as they have workers.
    layout = "actor.layout.dp=2" if (mode, num_engines * tp) == ("colocated", 4) else "actor.layout.dp=1"
    engines = [f"rollout.engine.num_engines={num_engines}", f"rollout.engine.tp={tp}"]
    assert_synced(completed(files, name, f"placement.mode={mode}", layout, *engines), num_engines=num_engines)
