"""Runs that share a cluster in a study are the runs that have one each, also after one has failed."""

from pathlib import Path

import pytest
import yaml

from megarl.record.metrics import RunPaths, read_metrics
from megarl_lab.recipes.tasks import TASKS
from megarl_lab.recipes.tasks.generate import GenerateConfig, generate
from megarl_lab.study.queue import load_study, plan_study, run_config, run_study
from tests.e2e.support import RUN_FILE, SMALL
from tests.helpers.checkpoints import make_checkpoint
from tests.helpers.kill_resume import MEASURED

SETTINGS = (
    "run.deterministic=true",
    "trainer.total_steps=2",
    "trainer.prompts_per_step=8",
    "rollout.num_samples=4",
    "rollout.max_response_tokens=16",
    "actor.optimizer.lr=0.001",
    # The model is random and earns nothing: the entropy's gradient moves it.
    "algo.entropy_coef=0.01",
    "validation.every_steps=2",
)


def computed(root: Path) -> list[tuple[int, dict[str, float]]]:
    """What was logged, but for times and memory."""
    records = read_metrics(RunPaths(root).metrics)
    return [(r.step, {k: v for k, v in r.metrics.items() if not k.startswith(MEASURED)}) for r in records]


@pytest.mark.long
@pytest.mark.timeout(900)
def test_runs_of_a_study_are_the_runs_of_their_own_clusters(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from megarl.run.start import train

    model = make_checkpoint(tmp_path / "model", tied=True)
    sizes = GenerateConfig(seed=0, num_sft=1, num_train=32, num_val=4)
    files = generate(TASKS.get("sums"), tmp_path / "data", sizes)
    inputs = [f"model.path={model}", f"data.train=[{files.train}]", f"data.val=[{files.val}]"]
    tree = {
        "base": str(RUN_FILE),
        "dir": str(tmp_path / "together"),
        "overrides": [*SMALL, *SETTINGS, *inputs],
        "runs": [
            # No engine is that close: the gate fails the run, and the others go on in a new cluster.
            {"algo": "grpo", "seed": 0, "overrides": ["trainer.mismatch_gate_nats=1e-30"]},
            {"algo": "grpo", "seed": 1},
            {"algo": "gspo", "seed": 0, "overrides": ["rollout.num_samples=2"]},
        ],
    }
    (tmp_path / "study.yaml").write_text(yaml.safe_dump(tree))
    study = load_study(tmp_path / "study.yaml")
    assert run_study(study) == ["grpo-seed0"]
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("[")]
    assert [line.partition(":")[0] for line in lines] == ["[1/3] grpo-seed0", "[2/3] grpo-seed1", "[3/3] gspo-seed0"]
    assert "FAILED after" in lines[0]
    assert "MismatchError: the engine's log-probs differ from the trainer's" in lines[0]
    assert list((tmp_path / "together" / "logs").glob("worker-*"))
    assert [run.name for run in plan_study(study).waiting] == ["grpo-seed0"]
    (tmp_path / "study.yaml").write_text(yaml.safe_dump(tree | {"dir": str(tmp_path / "apart")}))
    apart = load_study(tmp_path / "study.yaml")
    for run in apart.runs[1:]:
        train(run_config(apart, run))
        own, shared = (computed(tmp_path / name / run.full_name) for name in ("apart", "together"))
        assert [step for step, _ in own] == [0, 1, 2, 2]
        assert shared == own
        weights = [tmp_path / name / run.full_name / "export" / "model.safetensors" for name in ("apart", "together")]
        assert weights[0].read_bytes() == weights[1].read_bytes()
