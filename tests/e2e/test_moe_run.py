"""Whole runs of a model with experts: sampled by vLLM, synced, exported, and replayed in other layouts."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file

from megarl.record.metrics import RunPaths, read_metrics
from megarl_lab.recipes.tasks.generate import TaskFiles
from tests.e2e import cli_run
from tests.e2e.support import RUN_FILE, TP2
from tests.helpers.expert_checkpoint import make_moe

pytestmark = pytest.mark.long

SETTINGS = (
    *TP2,
    "run.dir=.",
    "data.val=[]",
    "rollout.num_samples=4",
    "rollout.max_response_tokens=16",
    "rollout.engine.max_num_seqs=32",
    "trainer.total_steps=3",
    "trainer.prompts_per_step=4",
    "trainer.mini_batch_prompts=2",
    # Random answers earn nothing; the bonus and the balance loss are what moves the weights.
    "algo.entropy_coef=0.1",
    "actor.moe.aux_loss_coef=0.01",
    "actor.optimizer.lr=0.003",
    # Large against the rounding of gradients: weights whose gradient is noise would move by ±lr.
    "actor.optimizer.eps=1e-4",
    "actor.optimizer.warmup_steps=0",
    "sync.verify=true",
)
TP2_EP2 = "actor.layout={tp: 2, ep: 2, sequence_parallel: true}"
REPLAYS = {
    "ep1": "actor.layout={tp: 1, sequence_parallel: false}",
    "ep2": "actor.layout={tp: 1, sequence_parallel: false, dp: 2, ep: 2}",
}


# Three layers, of which the second has no experts; two of six experts per token.
MODEL = {
    "num_hidden_layers": 3,
    "num_experts": 6,
    "norm_topk_prob": True,
    "mlp_only_layers": [1],
    "initializer_range": 0.12,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Runs:
    """Runs of the command on one model, in one directory."""

    directory: Path
    inputs: tuple[str, ...]

    def paths(self, name: str) -> RunPaths:
        return RunPaths(self.directory / name)

    def run(self, name: str, *settings: str) -> None:
        """To its end; nothing is left behind."""
        run = cli_run.start(
            self.directory, "train", str(RUN_FILE), *SETTINGS, *self.inputs, f"run.name={name}", *settings
        )
        try:
            run_id = run.run_id()
            assert run.process.wait(cli_run.START_S) == 0, run.stderr.read_text()
        finally:
            run.end()
        assert cli_run.leftovers(run_id) == []


@pytest.fixture(scope="module")
def recorded(sums: TaskFiles, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    directory = tmp_path_factory.mktemp("experts")
    model = make_moe(directory / "model", seed=0, **MODEL)
    runs = Runs(directory=directory, inputs=(f"model.path={model}", f"data.train=[{sums.train}]"))
    runs.run("recorded", TP2_EP2, "rollout.record=true")
    return runs


def test_the_engine_follows_the_trainer(recorded: Runs) -> None:
    """Checksums of every tensor agreed on both sides, and so do log-probs of what the engine sampled."""
    records = read_metrics(recorded.paths("recorded").metrics)
    assert [record.step for record in records] == [1, 2, 3]
    for record in records:
        assert 0 < record.metrics["mismatch/abs_mean"] <= 1e-5
        assert record.metrics["actor/grad_norm"] > 0
        assert record.metrics["moe/aux_loss"] >= 1
        assert record.metrics["moe/load_max_over_mean"] >= 1


@pytest.mark.parametrize("name", list(REPLAYS))
def test_a_replay_in_another_layout_is_the_same_run(recorded: Runs, name: str) -> None:
    records = recorded.paths("recorded").records
    recorded.run(name, REPLAYS[name], "rollout.source=replay", f"rollout.replay_dir={records}")
    steps = [read_metrics(recorded.paths(each).metrics) for each in (name, "recorded")]
    for got, expected in zip(*steps, strict=True):
        assert got.metrics["actor/grad_norm"] == pytest.approx(expected.metrics["actor/grad_norm"], rel=1e-4)
        for metric in ("actor/loss", "actor/entropy", "moe/aux_loss", "moe/load_max_over_mean"):
            assert got.metrics[metric] == pytest.approx(expected.metrics[metric], abs=1e-5), metric
    first, mine, theirs = (
        load_file(path / "model.safetensors")
        for path in (recorded.directory / "model", recorded.paths(name).export, recorded.paths("recorded").export)
    )
    assert first.keys() == mine.keys() == theirs.keys()
    moved = max(float((theirs[key] - first[key]).abs().max()) for key in first)
    assert 1e-3 < moved < np.inf
    assert max(float((mine[key] - theirs[key]).abs().max()) for key in first) <= 1e-5
