"""Runs of three steps on prompts that a random policy answers rightly half of the time."""

import math
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
from safetensors.numpy import load_file

from megarl.record.metrics import RunPaths, read_metrics
from megarl_lab.recipes.public_files import write_parquet
from megarl_lab.recipes.tasks.generate import TaskFiles
from tests.e2e.support import SMALL
from tests.helpers.kill_resume import MEASURED

TOTAL_STEPS = 3
DATA_SOURCE = "tests/even-length"
RUN = (
    *SMALL,
    f"trainer.total_steps={TOTAL_STEPS}",
    "trainer.prompts_per_step=4",
    "rollout.num_samples=4",
    "rollout.max_response_tokens=24",
    "validation.before_train=false",
    "data.val=[]",
    "actor.optimizer.lr=1e-3",
    "logging.rollout_every_steps=0",
    f"rewards.custom.path={Path(__file__).with_name('even_length.py')}",
    "rewards.custom.name=compute_score",
)
# Their actor waits for nothing and rewards differ, so these steps must move the weights.
NAMED_METRICS: Mapping[str, tuple[str, ...]] = {
    "cpo": ("cpo/delta_mean", "cpo/hint_len_mean", "cpo/adv_delta_abs_mean"),
    "luffy": ("actor/off_pg_loss", "batch/off_solved"),
    "luffy_sft": ("actor/imitation_loss",),
    "ppo": ("critic/vf_loss", "critic/vf_explained_var", "timing_s/update_critic"),
    "ppo_critic": ("critic/frozen", "reward_source/critic"),
    "ppo_reward_mask": ("reward_mask/num_masked",),
    "reinforce_pro": ("is/accept_frac", "is/ess"),
    "gkd": ("distill/loss", "distill/forward_kl", "distill/agreement"),
    "opd": ("distill/reverse_kl", "distill/teacher_entropy", "timing_s/teacher"),
    "opd_exact": ("distill/loss", "distill/forward_kl", "distill/agreement"),
    "self_distill": ("distill/loss", "distill/forward_kl", "cpo/hint_len_mean"),
    "dapo": ("filter/num_groups_removed", "filter/num_refills"),
}


def write_prompts(sums: TaskFiles, path: Path) -> Path:
    """The prompts of sums with their solutions and demonstrations, judged by `even_length.compute_score`."""
    write_parquet(path, [{**row, "data_source": DATA_SOURCE} for row in pq.read_table(sums.train).to_pylist()])
    return path


class Result:
    """What a run left."""

    def __init__(self, paths: RunPaths, model: Path) -> None:
        self.paths = paths
        self.steps = [record.metrics for record in read_metrics(paths.metrics)]
        before, after = (load_file(next(path.glob("*.safetensors"))) for path in (model, paths.export))
        self.largest_change = max(float(np.abs(after[name] - before[name]).max()) for name in before)

    @property
    def without_times(self) -> list[dict[str, float]]:
        return [{k: v for k, v in step.items() if not k.startswith(MEASURED)} for step in self.steps]


def check(result: Result, algorithm: str) -> None:
    """Three finite steps that moved the policy and logged what belongs to the algorithm."""
    assert len(result.steps) == TOTAL_STEPS
    for metrics in result.steps:
        assert all(math.isfinite(value) for value in metrics.values())
        assert metrics["mismatch/abs_mean"] < 1e-4
        assert metrics["actor/grad_norm"] > 0
        missing = [name for name in NAMED_METRICS.get(algorithm, ()) if name not in metrics]
        assert not missing
    # Adam's first steps are of about the learning rate's size.
    assert 1e-4 < result.largest_change < 1e-2
