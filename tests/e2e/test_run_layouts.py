"""Whole runs of the command: pipeline parallel, tensor and pipeline parallel, bfloat16.

Their engines too: split from the trainer, colocated, colocated and tensor parallel.
"""

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from megarl.record.metrics import RunPaths, read_metrics
from megarl.types import FloatArray
from megarl_lab.recipes.tasks.generate import TaskFiles
from tests.e2e import cli_run
from tests.e2e.checked_trainer import Seen, compared_rows
from tests.e2e.support import REPOSITORY, RUN_FILE, TP2
from tests.helpers.checkpoints import VOCAB_SIZE, make_checkpoint

# Pipeline stages in whole runs are in the default set too: test_algorithms_cli.py.
pytestmark = pytest.mark.long

SETTINGS = (
    *TP2,
    "run.dir=.",
    "run.name=run",
    "data.val=[]",
    "rollout.num_samples=4",
    "rollout.max_response_tokens=16",
    "rollout.engine.max_num_seqs=32",
    "trainer.total_steps=3",
    "trainer.prompts_per_step=6",
    # Random answers earn nothing; the bonus is what moves the weights.
    "algo.entropy_coef=0.1",
    "actor.optimizer.lr=0.003",
    "actor.optimizer.warmup_steps=0",
    # A reference too.
    "algo.kl.where=loss",
    "sync.verify=true",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What a run adds to two tensor-parallel ranks, and how far log-probs may differ.

    gate_nats: the limit of mean |Δ| on samples. In `statistic` of |Δ| over tokens two implementations differ by at
    most `nats`.
    """

    settings: tuple[str, ...]
    tied: bool
    dtype: str = "float32"
    gate_nats: float = 1e-4
    statistic: Callable[..., FloatArray] = np.max
    nats: float = 1e-5


CASES = {
    "pp2-split": Case(
        settings=(
            "actor.layout.tp=1",
            "actor.layout.sequence_parallel=false",
            "actor.layout.pp=2",
            "placement.mode=split",
        ),
        tied=True,
    ),
    "tp2-pp2": Case(settings=("actor.layout.pp=2",), tied=False),
    "tp2-bfloat16": Case(
        settings=("model.dtype=bfloat16", "rollout.engine.tp=2"),
        tied=True,
        dtype="bfloat16",
        gate_nats=0.05,
        statistic=np.mean,
        nats=0.05,
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """A run that ended with exit code 0 and left nothing behind."""

    case: Case
    paths: RunPaths
    seen: Seen


@pytest.fixture(scope="module", params=CASES.values(), ids=CASES)
def finished(request: pytest.FixtureRequest, sums: TaskFiles, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    case, directory = request.param, tmp_path_factory.mktemp("layout")
    model = make_checkpoint(directory / "model", tied=case.tied, dtype=case.dtype)
    inputs = (f"model.path={model}", f"data.train=[{sums.train}]")
    run = cli_run.start(
        directory,
        *("train", str(RUN_FILE), *SETTINGS, *inputs, *case.settings),
        command=("env", f"PYTHONPATH={REPOSITORY}", sys.executable, "-m", "tests.e2e.checked_train", "seen.json"),
    )
    try:
        run_id = run.run_id()
        assert run.process.wait(cli_run.START_S) == 0, run.stderr.read_text()
    finally:
        run.end()
    assert cli_run.leftovers(run_id) == []
    seen = Seen(**json.loads((directory / "seen.json").read_text()))
    return Finished(case=case, paths=RunPaths(directory / "run"), seen=seen)


def test_three_steps_within_the_gate(finished: Finished) -> None:
    records = read_metrics(finished.paths.metrics)
    assert [record.step for record in records] == [1, 2, 3]
    for record in records:
        assert 0 < record.metrics["mismatch/abs_mean"] <= finished.case.gate_nats
        assert record.metrics["actor/grad_norm"] > 0
    assert finished.paths.report_html.exists()


def test_the_engine_has_the_trainers_weights_after_every_sync(finished: Finished) -> None:
    case, trainer = finished.case, np.array(finished.seen.trainer_logprobs)
    engine = np.array(finished.seen.engine_logprobs)[:, 0]
    assert len(trainer) == len(engine) == 4
    assert case.statistic(np.abs(engine - trainer), axis=1).max() <= case.nats
    # Weights of the step before would be noticed.
    assert case.statistic(np.abs(np.diff(trainer, axis=0)), axis=1).min() > 2 * case.nats


def test_the_export_is_the_policy_in_transformers(finished: Finished) -> None:
    case, trainer = finished.case, np.array(finished.seen.trainer_logprobs[-1])
    hf = AutoModelForCausalLM.from_pretrained(finished.paths.export, dtype="auto")
    assert hf.dtype == getattr(torch, case.dtype)
    ids = torch.from_numpy(np.stack([row.token_ids for row in compared_rows(VOCAB_SIZE)]))
    with torch.no_grad():
        logprobs = hf.float()(ids).logits[:, :-1].log_softmax(-1).gather(2, ids[:, 1:, None])
    assert case.statistic(np.abs(logprobs.flatten().numpy() - trainer)) <= case.nats
