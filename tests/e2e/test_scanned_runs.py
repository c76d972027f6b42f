"""A run whose listeners strangers call all the time: connections are closed, and it does what it would do alone."""

import contextlib
import itertools
import json
import os
import random
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.e2e.cli_run import CliRun
from tests.e2e.test_judges import JUDGE
from tests.helpers.kill_resume import MEGARL, SmallRun, differences, make_inputs
from tests.helpers.listeners import listeners_of

NUM_OF_A_FLOOD, MOST_HELD = 50, 400
AGENT = """
from openai import AsyncOpenAI

async def solve(prompt, base_url, api_key):
    async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        messages = [message.as_dict() for message in prompt.messages]
        answer = await client.chat.completions.create(model="policy", messages=messages)
    return len(answer.choices[0].message.content or "") / 100
"""
KEY = "k" * 32


def junk(caller: socket.socket) -> bool:
    caller.sendall(random.randbytes(4096))
    return False


def half_open(caller: socket.socket) -> bool:
    caller.sendall(b"POST /v1/chat/completions HTTP/1.1\r\ncontent-le")
    return True


def slow(caller: socket.socket) -> bool:
    caller.sendall(bytes(1))
    return True


# What a stranger does with a connection, whether it keeps it, and how many it opens at once.
KINDS: tuple[tuple[Callable[[socket.socket], bool], int], ...] = (
    (junk, 1),
    (half_open, 1),
    (slow, 1),
    (junk, NUM_OF_A_FLOOD),
)


@contextlib.contextmanager
def reward_service(directory: Path) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """The process and the port of a service that judges all rows, for those who know the key."""
    file = "def reward_func(queries, **_):\n    return {'rewards': [len(query) / 1000 for query in queries]}\n"
    (directory / "letters.py").write_text(file)
    function = f"rewards.custom={{path: {directory}/letters.py}}"
    command = [*MEGARL, "serve-reward", "--port", "0", "--api-key-env", "REWARD_KEY", "--data-source", "any", function]
    environment = os.environ | {"REWARD_KEY": KEY}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        try:
            yield process, int(process.stdout.readline().split(",")[0].rsplit(":", 1)[1].split("/")[0])
        finally:
            process.terminate()


@pytest.mark.long
@pytest.mark.timeout(2400)
def test_strangers_at_every_listener_change_nothing(tmp_path: Path) -> None:
    """Two ranks, an engine of two workers, agents, a judge's server, and a service for rewards, which strangers call in
    all ways in turn. What is of the run counts them.
    """
    inputs = make_inputs(tmp_path)
    (tmp_path / "agent.py").write_text(AGENT)
    with reward_service(tmp_path) as (service, service_port):
        rewards = {
            "manager": "hybrid",
            "hybrid": {
                "parts": {
                    "agent": {"manager": "environment"},
                    "served": {"manager": "judge", "judge": "served", "weight": 0.5},
                    "service": {"manager": "remote", "weight": 0.5},
                }
            },
            "remote": {"urls": [f"http://127.0.0.1:{service_port}/get_reward"], "api_key_env": "REWARD_KEY"},
            "judges": {"served": {**JUDGE, "server": "own"}},
            "judge_servers": {
                "own": {"model": str(inputs / "model"), "args": {"dtype": "float32", "max-model-len": 256}}
            },
        }
        settings = (
            "trainer.total_steps=2",
            "actor.optimizer.warmup_steps=0",
            "data.val=[]",
            "cluster.start_timeout_s=900",
            "rollout.engine={tp: 2, num_engines: 1}",
            "environment.default=a",
            f"environment.entries={{a: {{type: agent, arguments: {{agent: '{tmp_path}/agent.py:solve'}}}}}}",
            f"rewards={json.dumps(rewards)}",
        )
        run = SmallRun(inputs=inputs, name="scanned", settings=settings, environment={"REWARD_KEY": KEY})
        log = run.paths.root.with_suffix(".log")
        process = run.start()
        run_id = CliRun(process=process, stdout=log, stderr=log).run_id()
        held, called = list[socket.socket](), set[str]()
        for call, number in itertools.cycle(KINDS):
            if process.poll() is not None:
                break
            for listener in (*listeners_of(run_id, process.pid), *listeners_of("", service.pid)):
                for _ in range(number):
                    with contextlib.suppress(OSError):
                        caller = socket.create_connection(("127.0.0.1", listener.port), timeout=1.0)
                        called.add(listener.process)
                        if call(caller):
                            held.append(caller)
                        else:
                            caller.close()
            for caller in held[:-MOST_HELD]:
                caller.close()
            del held[:-MOST_HELD]
            for caller in held:
                with contextlib.suppress(OSError):
                    slow(caller)
        for caller in held:
            caller.close()
        assert process.returncode == 0, log.read_text()[-4000:]
        expected = {"raylet", "gcs_server", "EnvironmentWorkerActor", "megarl.rollout.judge_process", "megarl.cli"}
        assert expected <= called, called
        counted = run.records()[-1].metrics
        assert counted["foreign_connections/agents_endpoint"] > 0
        assert counted["foreign_connections/judge_server"] > 0
        alone = SmallRun(inputs=inputs, name="alone", settings=settings, environment={"REWARD_KEY": KEY})
        assert alone.start().wait() == 0
    assert sum("actor/lr" in record.metrics for record in run.records()) == 2
    assert not any(name.startswith("foreign_connections/") for each in alone.records() for name in each.metrics)
    # To the bit, the exported weights too.
    assert differences(run, alone) == []
