"""A mixture of all judges at once: the rule, a reward model on the trainer's ranks, and services over HTTP."""

import json
import math
import re
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from megarl.record.metrics import RunPaths, read_metrics
from megarl.record.rollouts import read_rollouts
from megarl.rewards import score
from megarl_lab.recipes.tasks.generate import TaskFiles
from tests.e2e import cli_run
from tests.e2e.cli_run import run_to_end
from tests.e2e.support import RUN_FILE, SMALL
from tests.helpers.checkpoints import add_value_head, make_checkpoint

# What an answer is worth to the service.
RIGHT, WRONG = 4.0, -2.0


@contextmanager
def serving(directory: Path) -> Iterator[str]:
    """The URL of a `megarl serve-reward` process; it must end well when it is told to."""
    directory.mkdir()
    worth = [f"rewards.sources.megarl/sums.{name}={value}" for name, value in (("correct", RIGHT), ("wrong", WRONG))]
    service = cli_run.start(directory, "serve-reward", "--port", "0", *worth, "rewards.verifier.workers=1")
    try:
        service.wait_until(lambda: "rewards at" in service.stdout.read_text(), "the service's address")
        found = re.search(r"rewards at (\S+),", service.stdout.read_text())
        assert found is not None
        yield found.group(1)
        service.process.send_signal(signal.SIGTERM)
        assert service.process.wait(cli_run.START_S) == 0, service.stderr.read_text()
    finally:
        service.end()


def unused_url() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{free.getsockname()[1]}/get_reward"


@pytest.mark.long
@pytest.mark.timeout(900)
def test_rule_model_and_services_at_once(tmp_path: Path, sums: TaskFiles) -> None:
    base = make_checkpoint(tmp_path / "base", tied=True)
    model = add_value_head(base, tmp_path / "model")
    AutoTokenizer.from_pretrained(base).save_pretrained(model)
    where = [f"run.dir={tmp_path}", "run.name=mixed", f"model.path={base}", f"data.train=[{sums.train}]"]
    steps = ["trainer.total_steps=2", "trainer.prompts_per_step=4", "rollout.num_samples=4"]
    parts = "{rule: {manager: rule}, judge: {manager: remote, weight: 0.5}, model: {manager: model, weight: 0.1, " \
        "transform: sigmoid}}"  # fmt: skip
    with serving(tmp_path / "service") as url:
        mixture = [
            "rewards.manager=hybrid",
            f"rewards.hybrid.parts={parts}",
            f"rewards.remote.urls=[{unused_url()}, {url}]",
            "rewards.remote.on_error=raise",
            "rewards.remote.rows_per_request=3",
            f"reward_model.model_path={model}",
        ]
        others = [f"data.val=[{sums.val}]", "logging.rollout_every_steps=1", "placement.offload=true"]
        run_to_end(tmp_path / "cwd", "train", str(RUN_FILE), *SMALL, *where, *steps, *mixture, *others)
    paths = RunPaths(tmp_path / "mixed")
    for step in (1, 2):
        records = read_rollouts(paths.rollouts(step))
        for record in records:
            rule = score("megarl/sums", record.response.removesuffix("<|im_end|>"), record.ground_truth, {}).score
            service, said = WRONG + (RIGHT - WRONG) * rule, json.loads(record.details)
            assert (said["rule/score"], said["judge/score"]) == (rule, service)
            mixture = rule + 0.5 * service + 0.1 / (1 + math.exp(-said["model/score"]))
            assert record.reward == pytest.approx(mixture, abs=1e-9)
        assert len({json.loads(record.details)["model/score"] for record in records}) > 1
    metrics = {r.step: r.metrics for r in read_metrics(paths.metrics) if "reward/dropped_rows" in r.metrics}
    for step in (1, 2):
        # Half of the services were down; no row was lost.
        assert metrics[step]["reward/judge/failed_attempts"] >= 1
        assert metrics[step]["reward/judge/unjudged_rows"] == metrics[step]["reward/dropped_rows"] == 0
        assert WRONG <= metrics[step]["reward/judge/score"] <= RIGHT
        assert metrics[step]["reward/timeout_frac"] == 0
        assert "reward/model/score" in metrics[step]
    # Validation is by the rule alone.
    validated = [
        r.metrics["val/test_score/megarl/sums"]
        for r in read_metrics(paths.metrics)
        if "val/test_score/megarl/sums" in r.metrics
    ]
    assert len(validated) == 2
    assert all(0.0 <= value <= 1.0 for value in validated)
