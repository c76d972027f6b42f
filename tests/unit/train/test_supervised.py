"""The loop of supervised training on ranks that are played by a fake: epochs, validation, and continuing."""

import json
import signal
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from megarl.cluster.cluster import Cluster
from megarl.config import load_config
from megarl.config.schema import Config
from megarl.errors import RunStopped
from megarl.record.metrics import read_metrics
from megarl.record.recorder import RunRecorder
from megarl.run.resume import find_checkpoint
from megarl.train.supervised import SupervisedTrainer
from megarl.train.tasks import SUPERVISED
from megarl.types import FloatArray, Row
from megarl.types.messages import ForwardRequest, LoadRequest, MicroBatchPlan, UpdateRequest, UpdateResult
from tests.helpers.checkpoints import make_checkpoint

ROOT = Path(__file__).parents[3]
NUM_ROWS = 11


class KilledError(Exception):
    """The end of a run that nothing announced."""


class FakeRanks:
    """A model of one number, which every step moves by the learning rate, the rows and their order."""

    def __init__(self, dies_in_step: int | None = None, signal_in_step: int | None = None) -> None:
        self.weight, self.dies_in_step, self.signal_in_step = 1 / 3, dies_in_step, signal_in_step
        self.seen: list[str] = []

    def load(self, request: LoadRequest) -> None:
        """Take a role."""

    def update(self, rows: Sequence[Row], plan: MicroBatchPlan, request: UpdateRequest) -> UpdateResult:
        if request.step == self.dies_in_step:
            raise KilledError
        if request.step == self.signal_in_step:
            signal.raise_signal(signal.SIGUSR1)
        for row in rows:
            self.weight = self.weight * 0.9 + request.lr * np.cos(self.weight + row.token_ids.sum())
        self.seen += [row.uid for row in rows]
        return UpdateResult(
            metrics={"actor/loss": self.weight, "actor/lr": request.lr},
            before={i: np.zeros(row.num_response_tokens, np.float32) for i, row in enumerate(rows)},
        )

    def forward(
        self, rows: Sequence[Row], plan: MicroBatchPlan, request: ForwardRequest
    ) -> dict[str, list[FloatArray]]:
        return {"logprobs": [np.full(row.num_response_tokens, -self.weight, np.float32) for row in rows]}

    def start_checkpoint(self, directory: Path, *, portable: bool) -> None:
        (directory / "weight").write_text(self.weight.hex())

    def finish_checkpoint(self, *, wait: bool) -> bool:
        return True

    def load_checkpoint(self, directory: Path, *, same_layout: Any) -> None:
        self.weight = float.fromhex((directory / "weight").read_text())


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    """Eleven rows, five of which are a step, for three epochs: the second step ends one and begins the next."""
    directory = tmp_path_factory.mktemp("supervised")
    rows = [{"prompt": f"{i}+{i}=?", "response": f"{2 * i}"} for i in range(NUM_ROWS)]
    for name, part in (("train", rows), ("val", rows[:3])):
        (directory / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    settings = (
        f"model.path={make_checkpoint(directory / 'model', tied=False)}",
        f"run.dir={directory}",
        f"sft.train=[{directory / 'train.jsonl'}]",
        f"sft.val=[{directory / 'val.jsonl'}]",
        *("sft.total_epochs=3", "sft.batch_size=5", "sft.val_every_steps=2"),
        *("actor.layout={}", "actor.optimizer.warmup_steps=2", "logging.tensorboard=false"),
        *("checkpoint.every_steps=1", "checkpoint.async_save=false"),
    )
    return load_config(ROOT / "configs/run/sums-sft.yaml", settings)


def train(config: Config, ranks: FakeRanks, monkeypatch: pytest.MonkeyPatch, *overrides: str) -> list[Any]:
    """Start or continue; what the run has recorded in the end, except for times and memory."""
    from megarl.config.load import with_overrides

    monkeypatch.setattr("megarl.train.supervised.export_role", lambda *_: None)
    opened = SUPERVISED["sft"](with_overrides(config, list(overrides)))
    config = opened.inputs.config
    checkpoint = find_checkpoint(config, "sft")
    recorder = RunRecorder(config, resumed_step=checkpoint.state.step if checkpoint else None)
    cluster = cast(Cluster, SimpleNamespace(workers=ranks, pids={}, metrics=lambda step: {}))
    try:
        SupervisedTrainer(opened.task, opened.inputs, cluster, recorder).fit(checkpoint)
    except (KilledError, RunStopped):
        return []
    return [
        (record.step, {name: record.metrics[name] for name in sorted(record.metrics) if not name.startswith(MEASURED)})
        for record in read_metrics(recorder.paths.metrics)
    ]


MEASURED = ("timing_s/", "perf/", "memory/")


def test_a_run_killed_within_an_epoch_continues_bit_for_bit(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = FakeRanks()
    expected = train(config, whole, monkeypatch, "run.name=whole")
    assert [step for step, _ in expected] == [0, 1, 2, 2, 3, 4, 4, 5, 6, 6]
    epochs = [metrics["progress/epoch"] for _, metrics in expected if "progress/epoch" in metrics]
    assert epochs == pytest.approx([5 / 11, 10 / 11, 15 / 11, 20 / 11, 25 / 11, 30 / 11])
    # ⌊3 · 11 / 5⌋ = 6 steps; each of two epochs has all rows, and the third all but three.
    assert [len(set(whole.seen[start : start + NUM_ROWS])) for start in (0, 11, 22)] == [11, 11, 8]
    # After three steps four rows of the second epoch have been seen.
    assert train(config, FakeRanks(dies_in_step=4), monkeypatch, "run.name=killed") == []
    continued = FakeRanks()
    assert train(config, continued, monkeypatch, "run.name=killed") == expected
    assert continued.seen == whole.seen[15:]
    assert continued.weight == whole.weight


def test_more_epochs_can_be_added(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    name, more = "run.name=longer", "sft.total_epochs=4"
    first, second, whole = FakeRanks(), FakeRanks(), FakeRanks()
    train(config, first, monkeypatch, name)
    train(config, second, monkeypatch, name, more, "sft.val_every_steps=3")
    train(config, whole, monkeypatch, "run.name=four", more)
    assert first.seen + second.seen == whole.seen
    assert len(whole.seen) == 40


def test_a_signal_is_followed_by_the_checkpoint_and_the_resumed_run_validates(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = train(config, FakeRanks(), monkeypatch, "run.name=unhurried")
    # A validation is due after the second step.
    assert train(config, FakeRanks(signal_in_step=2), monkeypatch, "run.name=hurried") == []
    records = read_metrics(Path(config.run.dir) / "hurried" / "metrics.jsonl")
    assert [record.step for record in records] == [0, 1, 2]
    assert train(config, FakeRanks(), monkeypatch, "run.name=hurried") == expected
