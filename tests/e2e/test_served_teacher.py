"""A teacher behind a server of vLLM says what the model says in transformers."""

from pathlib import Path

import numpy as np
import pytest
import torch

from megarl.config.teacher import TeacherConfig
from megarl.train.served_teacher import ServedTeacher
from tests.e2e.support import tied_head
from tests.helpers.checkpoints import load_hf
from tests.helpers.rows import random_rows
from tests.helpers.served import KEY, serving

TOP_K = 6


@tied_head
@pytest.mark.long
def test_a_servers_teacher_equals_the_local_one(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEACHER_KEY", KEY)
    rows = random_rows([(3, 9), (5, 14), (8, 20)], seed=4)
    with serving(model, tmp_path / "server.log", top_k=TOP_K) as server:
        cfg = TeacherConfig(model_path=str(model), servers=(server,), api_key_env="TEACHER_KEY")
        found = ServedTeacher(cfg, key="teacher", top_k=TOP_K).forward(rows, step=1)
    local = load_hf(model, torch.float32)
    for i, row in enumerate(rows):
        tokens = torch.from_numpy(row.token_ids)
        with torch.no_grad():
            log_q = local(tokens[None]).logits[0, row.num_prompt_tokens - 1 : -1].log_softmax(-1)
        own = log_q.gather(1, tokens[row.num_prompt_tokens :, None])[:, 0].numpy()
        top, mask = log_q.topk(TOP_K), row.loss_mask
        np.testing.assert_allclose(found["logprobs"][i][mask], own[mask], atol=1e-4)
        np.testing.assert_allclose(found["top_logprobs"][i][mask], top.values.numpy()[mask], atol=1e-4)
        np.testing.assert_array_equal(found["top_ids"][i][mask], top.indices.numpy()[mask])
