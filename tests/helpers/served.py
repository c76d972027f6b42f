"""A model behind a server of vLLM."""

import contextlib
import os
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import httpx

from megarl.cluster.judge_key import KEY_VARIABLE
from megarl.cluster.judge_servers import server_command
from megarl.config.judges import JudgeServerConfig

KEY, START_S = "a-key-of-this-test", 240.0


@contextlib.contextmanager
def serving(model: Path, log_file: Path, *, top_k: int) -> Iterator[str]:
    """The address of a server of a model, which answers the log-probs of so many tokens and asks for the key."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    args = {"max-logprobs": top_k, "dtype": "float32", "max-model-len": 256, "logprobs-mode": "raw_logprobs"}
    command = server_command(JudgeServerConfig(model=str(model), args=args), "127.0.0.1", port)
    with log_file.open("wb") as log:
        process = subprocess.Popen(command, env={**os.environ, KEY_VARIABLE: KEY}, stdout=log, stderr=log)
    url, headers = f"http://127.0.0.1:{port}", {"authorization": f"Bearer {KEY}"}
    try:
        deadline = time.monotonic() + START_S
        while True:
            assert process.poll() is None, log_file.read_text()[-2000:]
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
