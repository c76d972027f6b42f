"""A reward model from pairs to rewards: trained, continued under another layout, exported, and a policy's judge."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from megarl.record.metrics import RunPaths, read_metrics
from megarl.record.rollouts import read_rollouts
from megarl.rewards import score
from megarl.rollout.replay import read_record, record_path
from megarl.types import Sample
from megarl_lab.recipes.tasks import TASKS
from megarl_lab.recipes.tasks.generate import PreferenceConfig, TaskFiles, generate_preferences
from tests.e2e.cli_run import run_to_end
from tests.e2e.support import REPOSITORY, RUN_FILE, SMALL
from tests.helpers.checkpoints import make_checkpoint

REWARD_FILE = REPOSITORY / "configs" / "run" / "sums-reward.yaml"
# float32 rounding of two implementations.
SCORE = 1e-5


def scores(model: Path, samples: Sequence[Sample]) -> dict[tuple[str, int], float]:
    """What transformers says of recorded samples, by uid and index."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    judge = AutoModelForSequenceClassification.from_pretrained(model, dtype=torch.float32).eval()
    # Transformers would look for the score before it, also where it was sampled.
    judge.config.pad_token_id = None
    found = {}
    for sample in samples:
        ids = [*sample.prompt_token_ids, *sample.response_token_ids]
        if sample.finish_reason == "stop":
            ids += tokenizer("\n")["input_ids"]
        with torch.no_grad():
            found[sample.uid, sample.sample_index] = judge(torch.tensor([ids])).logits[0, 0].item()
    return found


@pytest.mark.long
@pytest.mark.timeout(900)
def test_from_pairs_to_rewards(tmp_path: Path, sums: TaskFiles) -> None:
    base = make_checkpoint(tmp_path / "base", tied=True)
    pairs = generate_preferences(TASKS.get("sums"), tmp_path, PreferenceConfig(num_train=64, num_val=16), score)
    where = [f"run.dir={tmp_path}", f"model.path={base}"]
    data = [f"train_reward.train=[{pairs.train}]", f"train_reward.val=[{pairs.val}]", "train_reward.batch_size=8"]
    small = [*SMALL, "actor.optimizer.schedule=constant", "train_reward.val_every_steps=2", *where, *data]
    two_ranks = ["actor.layout.dp=2", "train_reward.total_steps=2"]
    for settings in (two_ranks, ["actor.layout.dp=1", "train_reward.total_steps=4", "--resume"]):
        printed = run_to_end(tmp_path / "cwd", "train-reward", str(REWARD_FILE), *small, *settings)
    assert "validation on 16 pairs: accuracy" in printed
    judge = RunPaths(tmp_path / "reward-model")
    trained = read_metrics(judge.metrics)
    assert [record.step for record in trained if "reward_model/loss" in record.metrics] == [1, 2, 3, 4]
    assert [record.step for record in trained if "val/reward_model/accuracy" in record.metrics] == [0, 2, 4]
    assert judge.report_html.is_file()

    prompts = [f"data.train=[{sums.train}]", "data.val=[]", "run.name=judged", "trainer.total_steps=2"]
    rollouts = [
        "trainer.prompts_per_step=4",
        "rollout.num_samples=4",
        "logging.rollout_every_steps=1",
        "rollout.record=true",
    ]
    # Roles of their own layouts, moved to the host and back.
    judged = ["rewards.manager=model", f"reward_model.model_path={judge.export}", "placement.offload=true"]
    alone = ["reward_model.layout={dp: 2}"]
    run_to_end(tmp_path / "cwd", "train", str(RUN_FILE), *SMALL, *where, *prompts, *rollouts, *judged, *alone)
    paths = RunPaths(tmp_path / "judged")
    for step in (1, 2):
        expected = scores(judge.export, read_record(record_path(paths.records, step)).samples)
        assert len(expected) == 16
        rewards = {(r.uid, r.sample_index): r.reward for r in read_rollouts(paths.rollouts(step))}
        assert rewards == pytest.approx(expected, abs=SCORE)
