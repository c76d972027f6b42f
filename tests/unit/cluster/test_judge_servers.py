"""The command that serves a judge's model."""

import sys

from megarl.cluster.judge_servers import server_command
from megarl.config.judges import JudgeServerConfig


def test_flags_of_a_server() -> None:
    """The user's flags replace those of the device; null and false leave a flag out."""
    args = {"max-model-len": 512, "block-size": 16, "enforce-eager": False, "trust-remote-code": True, "seed": None}
    command = server_command(JudgeServerConfig(model="m", tp=2, args=args), "10.0.0.1", 81)
    assert command == [
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server"),
        *("--model", "m", "--host", "10.0.0.1", "--port", "81", "--tensor-parallel-size", "2"),
        *("--kv-cache-memory-bytes", str(64 << 20), "--block-size", "16", "--max-model-len", "512"),
        "--trust-remote-code",
    ]
