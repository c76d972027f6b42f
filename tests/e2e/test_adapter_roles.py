"""Actor, critic and reward model with adapters in whole runs, all on the weights that the actor leaves as they are."""

from pathlib import Path

import pytest

from megarl.record.metrics import RunPaths
from megarl_lab.recipes.tasks.generate import TaskFiles
from tests.e2e.algorithms import write_prompts
from tests.e2e.test_adapter_commands import command, metrics_of
from tests.helpers.checkpoints import make_checkpoint
from tests.helpers.hf_models import read_tensors

ADAPTERS = "rank: 4, alpha: 8"
FEW = ("rollout.num_samples=4", "trainer.prompts_per_step=4", "trainer.mini_batch_prompts=4", "data.val=[]")


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_a_critic_judges_the_next_run(tmp_path: Path, sums: TaskFiles) -> None:
    """PPO with a reference; then the critic's adapters and head are those of a reward model, on the same base."""
    base = make_checkpoint(tmp_path / "base", tied=True)
    data = f"data.train=[{write_prompts(sums, tmp_path / 'train.parquet')}]"
    judge = [f"rewards.custom.path={Path(__file__).with_name('even_length.py')}", "rewards.custom.name=compute_score"]
    critic = [f"critic.lora={{{ADAPTERS}}}", "critic.optimizer.lr=1e-2", "critic.optimizer.warmup_steps=0"]
    ppo = ["use.algo=ppo", "algo.kl.where=loss", "trainer.total_steps=2", "placement.offload=true"]
    run = command(tmp_path, "train", "sums-rl", base, *critic, *ppo, *judge, data, *FEW)
    for name in ("actor/grad_norm", "critic/grad_norm", "critic/vf_loss"):
        assert min(metrics_of(run, name).values()) > 0
    assert max(metrics_of(run, "mismatch/abs_mean").values()) < 1e-4
    written = run.export_critic.with_name("export_critic_adapter")
    assert float(read_tensors(written)["base_model.model.score.weight"].abs().max()) > 0
    assert not run.export_critic.exists()

    reward = [f"reward_model.lora={{{ADAPTERS}, path: {written}}}", "rewards.manager=model", "run.name=judged"]
    command(tmp_path, "train", "sums-rl", base, *reward, "trainer.total_steps=1", data, *FEW)
    judged = RunPaths(tmp_path / "judged")
    assert metrics_of(judged, "critic/score/max")[1] > metrics_of(judged, "critic/score/min")[1]
