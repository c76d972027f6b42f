"""Measure how many turns a second the environment workers manage, with an engine that answers at once:

    python -m megarl_lab.bench.episodes --episodes 2000 --turns 5

All episodes are under way at the same time. Hosts, driver and their messages are the real ones; only the engine is not,
so that its time does not count. Prints a table and JSON: turns/s, the memory of a host, and the delay of one reply.
"""

import argparse
import asyncio
import json
import os
import tempfile
import time
from pathlib import Path

import numpy as np
import psutil
import ray

from megarl.cluster.engines import EngineGroup
from megarl.cluster.episodes import EnvironmentWorkers
from megarl.cluster.ray_session import open_ray
from megarl.config.environments import EnvironmentConfig, EnvironmentEntry
from megarl.config.generation import Sampling
from megarl.config.schema import ClusterConfig
from megarl.data.chat import encode_chats
from megarl.environments import Action, Environment, Reply
from megarl.environments.worker import WorkerSpec
from megarl.host import loop
from megarl.host.device.platform import apply_environment
from megarl.host.ray_environment import RAY_ENVIRONMENT
from megarl.record.text_table import align
from megarl.rollout.engine import Completion, GenerationRequest
from megarl.rollout.source import Doing, Group, SamplingPlan, begin, collect
from megarl.rollout.vllm_source import VllmSource
from megarl.types import FinishReason, Message, Prompt, version_spans
from megarl_lab.recipes.tiny_model import make_byte_tokenizer

TIMEOUT_S = 120.0


class Echo(Environment):
    """Repeats each turn, `turns` times."""

    def __init__(self, *, turns: int) -> None:
        self.turns = turns

    async def reply(self, action: Action) -> Reply:
        message = Message(role="user", content=action.text)
        return Reply(messages=(message,), done=action.turn + 1 == self.turns, reward=1.0)


class InstantEngines:
    """Engines that answer each request with the same turn at once, and wait for hosts alone."""

    def __init__(self, hosts: EnvironmentWorkers) -> None:
        self._group = EngineGroup([], timeout_s=TIMEOUT_S)
        self._group.environment_workers = hosts
        ids = make_byte_tokenizer()("I think that the answer is 42.")["input_ids"] + [2]
        self._completion = Completion(
            token_ids=np.asarray(ids),
            logprobs=np.zeros(len(ids), np.float32),
            finish_reason=FinishReason.STOP,
            versions=version_spans(np.zeros(len(ids), np.int64)),
        )

    def generate(self, request: GenerationRequest) -> "asyncio.Future[Completion]":
        completion: asyncio.Future[Completion] = loop.event_loop().create_future()
        completion.set_result(self._completion)
        return completion

    def wait(self, work: "asyncio.Future[None]", *, timeout_s: float, doing: Doing) -> None:
        loop.wait(self._group.attend(work, timeout_s=timeout_s, doing=doing))

    def parts(self) -> "dict[asyncio.Future[Completion], Completion]":
        return {}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=2000)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--hosts", type=int, default=1)
    options = parser.parse_args()
    tokenizer = make_byte_tokenizer()
    question = (Message(role="user", content="What is the answer?"),)
    prompt_ids = tuple(encode_chats(tokenizer, [question])[0])
    prompts = [
        Prompt(
            uid=f"p{i}", token_ids=prompt_ids, data_source="d", ground_truth="", messages=question, environment="echo"
        )
        for i in range(options.episodes)
    ]
    plan = SamplingPlan(
        step=1, num_samples=1, sampling=Sampling(temperature=1.0), max_response_tokens=100_000, run_seed=0
    )
    with tempfile.TemporaryDirectory() as directory:
        tokenizer.save_pretrained(directory)
        apply_environment()
        os.environ.update(RAY_ENVIRONMENT)
        settings = ClusterConfig(num_cpus=2)
        open_ray(settings, num_cpus=2, temp_dir=Path(directory), environment={"TMPDIR": directory})
        entry = EnvironmentEntry(type=f"{Path(__file__).resolve()}:Echo", arguments={"turns": options.turns})
        config = EnvironmentConfig(entries={"echo": entry}, max_turns=options.turns + 1, hosts=options.hosts)
        spec = WorkerSpec(model_path=directory, chat_template={}, names=("echo",), config=config)
        hosts = EnvironmentWorkers(spec, timeout_s=TIMEOUT_S, trouble=asyncio.Event())
        source = VllmSource(engines := InstantEngines(hosts), hosts, config)
        began = time.monotonic()
        groups = [Group(prompt=prompt, plan=plan) for prompt in prompts]
        begin(source, groups)
        samples = collect(engines.wait, groups, timeout_s=TIMEOUT_S).samples
        took_s = time.monotonic() - began
        memory = [psutil.Process(process.location.pid).memory_info().rss / 2**30 for process in hosts.processes]
        hosts.close()
        ray.shutdown()
    assert all(sample.finish_reason is FinishReason.STOP for sample in samples)
    result = {
        "episodes": options.episodes,
        "turns": options.turns,
        "hosts": options.hosts,
        "turns_per_s": options.episodes * options.turns / took_s,
        "host_rss_gib": max(memory),
        "load": psutil.getloadavg()[0],
    }
    print("\n".join(align([[name, f"{value:.4g}"] for name, value in result.items()])))
    print(json.dumps(result))


if __name__ == "__main__":
    main()
