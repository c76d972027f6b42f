"""A teacher behind a server of vLLM says what the model says in transformers."""

import os
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest
import torch

from megarl.cluster.judge_key import KEY_VARIABLE
from megarl.cluster.judge_servers import server_command
from megarl.config.judges import JudgeServerConfig
from megarl.config.teacher import TeacherConfig
from megarl.train.served_teacher import ServedTeacher
from tests.e2e.support import tied_head
from tests.helpers.checkpoints import load_hf
from tests.helpers.rows import random_rows

KEY, TOP_K, START_S = "a-key-of-this-test", 6, 240.0


@pytest.fixture
def server(model: Path, tmp_path: Path) -> Iterator[str]:
    """The address of a server of the model."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    args = {"max-logprobs": TOP_K, "dtype": "float32", "max-model-len": 256, "logprobs-mode": "raw_logprobs"}
    command = server_command(JudgeServerConfig(model=str(model), args=args), "127.0.0.1", port)
    with (tmp_path / "server.log").open("wb") as log:
        process = subprocess.Popen(command, env={**os.environ, KEY_VARIABLE: KEY}, stdout=log, stderr=log)
    url, headers = f"http://127.0.0.1:{port}", {"authorization": f"Bearer {KEY}"}
    try:
        deadline = time.monotonic() + START_S
        while True:
            assert process.poll() is None, (tmp_path / "server.log").read_text()[-2000:]
            assert time.monotonic() < deadline, "the server does not start"
            try:
                if httpx.get(f"{url}/health", headers=headers, trust_env=False).is_success:
                    break
            except httpx.HTTPError:
                time.sleep(0.5)
        yield f"{url}/v1"
    finally:
        process.terminate()
        process.wait(60)


@tied_head
@pytest.mark.long
def test_a_servers_teacher_equals_the_local_one(server: str, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEACHER_KEY", KEY)
    cfg = TeacherConfig(model_path=str(model), servers=(server,), api_key_env="TEACHER_KEY")
    rows = random_rows([(3, 9), (5, 14), (8, 20)], seed=4)
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
