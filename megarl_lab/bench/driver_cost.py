"""Measure what samples cost the driver: 10,000 of them on engines that answer at once, with the real Ray between.

    python -m megarl_lab.bench.driver_cost --samples 10000 --engines 2

Prints a table and JSON: CPU seconds of the driver, its wall time, and CPU per sample.
"""

import argparse
import asyncio
import json
import os
import queue
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np
import psutil
import ray

from megarl.cluster.actors import EngineActor
from megarl.cluster.engines import EngineGroup
from megarl.cluster.processes import locate
from megarl.cluster.ray_session import open_ray
from megarl.cluster.remotes import Location, Process
from megarl.config.generation import Sampling
from megarl.config.schema import ClusterConfig
from megarl.host import loop
from megarl.host.device.platform import apply_environment
from megarl.host.ray_environment import RAY_ENVIRONMENT
from megarl.record.text_table import align
from megarl.rollout.engine import Completion, EngineReply, GenerationRequest, VllmEngine
from megarl.rollout.source import Doing, Group, SamplingPlan, begin, collect
from megarl.rollout.stepping import EngineLoad
from megarl.rollout.vllm_source import VllmSource
from megarl.types import FinishReason, Prompt, version_spans

TIMEOUT_S, NUM_SAMPLES, RESPONSE_TOKENS, PROMPT_TOKENS = 120.0, 8, 256, 64
# How many requests a real engine might finish in one step.
PART = 16


class InstantEngine:
    """An actor that answers each request with as many tokens as it may have."""

    def __init__(self) -> None:
        self._added: queue.Queue[Mapping[int, GenerationRequest]] = queue.Queue()

    def locate(self) -> Location:
        return Location(host=ray.get_runtime_context().get_node_id(), address="", device_ids=(), pid=os.getpid())

    def lost_workers(self) -> list[int]:
        return []

    def call(self, method: Callable[..., None], *args: Mapping[int, GenerationRequest]) -> None:
        assert method is VllmEngine.add, "nothing else is asked of engines here"
        self._add(*args)

    def _add(self, requests: Mapping[int, GenerationRequest]) -> None:
        self._added.put(requests)

    @ray.method(concurrency_group="generation")
    def serve(self) -> Iterator[EngineReply]:
        load = EngineLoad(kv_tokens=0, written={}, cost=None)
        while True:
            requests = list(self._added.get().items())
            for start in range(0, len(requests), PART):
                part = {key: _completion(request) for key, request in requests[start : start + PART]}
                yield EngineReply(load=load, completions=part)


def _completion(request: GenerationRequest) -> Completion:
    return Completion(
        token_ids=np.arange(request.max_tokens),
        logprobs=np.zeros(request.max_tokens, np.float32),
        finish_reason=FinishReason.LENGTH,
        versions=version_spans(np.zeros(request.max_tokens, np.int64)),
    )


class Attended:
    """A group of engines of which none dies."""

    def __init__(self, group: EngineGroup) -> None:
        self._group, self.generate, self.parts = group, group.generate, group.parts

    def wait(self, work: "asyncio.Future[None]", *, timeout_s: float, doing: Doing) -> None:
        loop.wait(self._group.attend(work, timeout_s=timeout_s, doing=doing))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=10_000)
    parser.add_argument("--engines", type=int, default=2)
    options = parser.parse_args()
    apply_environment()
    os.environ.update(RAY_ENVIRONMENT)
    prompts = [
        Prompt(uid=f"p{i}", token_ids=(i, *range(PROMPT_TOKENS - 1)), data_source="d", ground_truth="")
        for i in range(options.samples // NUM_SAMPLES)
    ]
    plan = SamplingPlan(
        step=1,
        num_samples=NUM_SAMPLES,
        sampling=Sampling(temperature=1.0),
        max_response_tokens=RESPONSE_TOKENS,
        run_seed=0,
    )
    with tempfile.TemporaryDirectory() as directory:
        open_ray(ClusterConfig(num_cpus=2), num_cpus=2, temp_dir=Path(directory), environment={"TMPDIR": directory})
        actor = ray.remote(concurrency_groups={"generation": 1}, num_cpus=0)(InstantEngine)
        begun: list[Process[EngineActor]] = [
            Process(name=f"engine {i}", actor=actor.remote()) for i in range(options.engines)
        ]
        engines = locate(begun, timeout_s=TIMEOUT_S)
        source = VllmSource(attended := Attended(EngineGroup(engines, timeout_s=TIMEOUT_S)))
        cpu_s, began = time.process_time(), time.monotonic()
        groups = [Group(prompt=prompt, plan=plan) for prompt in prompts]
        begin(source, groups)
        samples = collect(attended.wait, groups, timeout_s=TIMEOUT_S).samples
        cpu_s, wall_s = time.process_time() - cpu_s, time.monotonic() - began
        loop.abandon()
        ray.shutdown()
    assert all(len(sample.response_token_ids) == RESPONSE_TOKENS for sample in samples)
    result = {
        "samples": len(samples),
        "engines": options.engines,
        "driver_cpu_s": cpu_s,
        "wall_s": wall_s,
        "cpu_us_per_sample": 1e6 * cpu_s / len(samples),
        "load": psutil.getloadavg()[0],
    }
    print("\n".join(align([[name, f"{value:.4g}"] for name, value in result.items()])))
    print(json.dumps(result))


if __name__ == "__main__":
    main()
