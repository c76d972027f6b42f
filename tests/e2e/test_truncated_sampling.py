"""Training on samples of top-p and top-k: engine and trainer compare the distributions over the same tokens."""

from pathlib import Path

import numpy as np
import torch

from megarl.cluster.cluster import Cluster
from megarl.config import load_config
from megarl.record.metrics import read_metrics
from megarl.record.recorder import RunRecorder
from megarl.rollout.replay import read_record, record_path
from megarl.train.inputs import open_train_inputs
from megarl.train.wiring import build_trainer
from megarl.types import row_from_sample
from megarl_lab.recipes.tasks.generate import TaskFiles
from tests.e2e.support import RUN_FILE, SMALL, tied_head
from tests.helpers.checkpoints import load_hf

TOP_K, TEMPERATURE = 20, 0.8
# float32 rounding of two implementations.
NATS = 1e-5


@tied_head
def test_two_steps(cluster: Cluster, model: Path, sums: TaskFiles, tmp_path: Path) -> None:
    overrides = [
        *SMALL,
        f"model.path={model}",
        f"run.dir={tmp_path}",
        "run.name=run",
        f"data.train=[{sums.train}]",
        "data.val=[]",
        "trainer.total_steps=2",
        "trainer.prompts_per_step=4",
        # Two optimizer steps per batch, so that the first has ratios of 1 and the second has others.
        "trainer.num_epochs=2",
        "rollout.num_samples=4",
        "rollout.max_response_tokens=16",
        f"rollout.temperature={TEMPERATURE}",
        "rollout.top_p=0.9",
        f"rollout.top_k={TOP_K}",
        "rollout.record=true",
        "algo.kl.where=loss",
        "algo.kl.coef=0.01",
        # Its gradient moves the policy whatever the rewards are.
        "algo.entropy_coef=0.01",
        "actor.optimizer.lr=0.0001",
        "logging.rollout_every_steps=0",
    ]
    config = load_config(RUN_FILE, overrides)
    recorder = RunRecorder(config, overwrite=True)
    build_trainer(open_train_inputs(config), cluster, recorder).fit()
    first, second = [record.metrics for record in read_metrics(recorder.paths.metrics)]
    # Ratios of old and rollout log-probs are 1, also after an update and a sync.
    assert first["mismatch/abs_mean"] <= NATS
    assert second["mismatch/abs_mean"] <= NATS
    # The reference is renormalised over the same tokens, and was the policy one optimizer step ago.
    assert 0 < first["actor/ref_kl"] < 0.01
    print(f"KL to the reference: {first['actor/ref_kl']:.1e}")

    rows = [row_from_sample(s) for s in read_record(record_path(recorder.paths.records, 1)).samples]
    policy, log_masses, sizes = load_hf(model, torch.float64), [], []
    for row in rows:
        assert row.nucleus is not None
        tokens = torch.from_numpy(row.token_ids)
        with torch.no_grad():
            log_p = (policy(tokens[None]).logits[0, row.num_prompt_tokens - 1 : -1] / TEMPERATURE).log_softmax(-1)
        kept = torch.from_numpy(row.nucleus).long()
        log_mass = log_p.gather(1, kept.clamp(min=0)).masked_fill(kept < 0, -torch.inf).logsumexp(1)
        full = log_p.gather(1, tokens[row.num_prompt_tokens :, None])[:, 0]
        np.testing.assert_allclose(row.quantities["rollout_logprobs"], full - log_mass, atol=1e-4)
        log_masses += log_mass.tolist()
        sizes += (kept >= 0).sum(1).tolist()
    assert 1 < np.mean(sizes) < max(sizes) <= TOP_K
    print(f"mean ln S: {np.mean(log_masses):.2f}; tokens to choose from: {np.mean(sizes):.1f}")
    # So far off would ratios of log-probs over the whole vocabulary be.
    assert np.mean(log_masses) < -0.1
