"""Run in a process of its own (`RankPool`): two engines, of which the one that runs idle takes over samples."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

from megarl.cluster.cluster import Cluster
from megarl.config.generation import Sampling
from megarl.host import loop
from megarl.rollout import routing
from megarl.rollout.engine import GenerationRequest
from megarl.rollout.regenerate import spans_of
from megarl.rollout.source import SamplingPlan, collect
from megarl.rollout.vllm_source import VllmSource
from megarl.types import FloatArray, Sample
from tests.e2e.support import UnattendedEngines, random_prompts, small_config
from tests.helpers.loops import begin_groups
from tests.helpers.rank_pool import RankContext

ENGINES = "rollout.engine={num_engines: 2, max_num_seqs: 8, kv_cache_mib: 64, block_size: 32}"
MAX_TOKENS = 320


@dataclass(frozen=True, slots=True, kw_only=True)
class Stolen:
    """Samples, the log-probs of each one's tokens but the first by a forward pass, and what the router knew.

    num_moved: how many samples moved, as the group counts them; kv_tokens: the capacity of each engine's cache.
    """

    samples: list[Sample]
    forward: list[FloatArray]
    num_moved: int
    kv_tokens: list[int]


def plan(num_samples: int, max_tokens: int) -> SamplingPlan:
    return SamplingPlan(
        step=1,
        num_samples=num_samples,
        sampling=Sampling(temperature=1.0),
        max_response_tokens=max_tokens,
        run_seed=0,
        may_move=True,
    )


def run(_: RankContext, model: str, directory: str) -> Stolen:
    """Give one engine two short samples and the other six long ones, half of which are to move when it is idle.

    Then let engines regenerate every segment, and compare.
    """

    def running(state: routing.EngineState, most: int) -> list[int]:
        """Do not ask whether it pays: with a model that is so small, it hardly does."""
        return [key for key in state.requests if state.written.get(key)][:most]

    def by_length(requests: Sequence[GenerationRequest], *_: object, **__: object) -> dict[int, int]:
        return {i: int(r.max_tokens > 2) if r.engine is None else r.engine for i, r in enumerate(requests)}

    config = small_config(Path(model), ENGINES, "placement.mode=split", f"rollout.max_response_tokens={MAX_TOKENS}")
    with (
        patch.object(routing, "_paying", running),
        patch.object(routing, "place_requests", by_length),
        Cluster(config, with_trainer=False) as cluster,
    ):
        group = cluster.engines
        assert isinstance(group.router, routing.ByLoad)
        source = VllmSource(engines := UnattendedEngines(group))
        # On a busy machine the long ones may be done before the idle engine is seen to be idle.
        for seed in range(10):
            before, (short, long) = group.num_moved, random_prompts([8, 8], seed=seed)
            groups = [
                *begin_groups(source, [short], plan(2, 2)),
                *begin_groups(source, [long], plan(6, MAX_TOKENS)),
            ]
            samples = list(collect(engines.wait, groups, timeout_s=120.0).samples)
            if group.num_moved > before:
                break
        sequences = [[*s.prompt_token_ids.tolist(), *s.response_token_ids.tolist()] for s in samples]
        found = Stolen(
            samples=samples,
            forward=group.prompt_logprobs(sequences),
            num_moved=group.num_moved - before,
            kv_tokens=[load.kv_tokens for load in group.router._loads.values()],
        )
        # Each segment is a request of its own, which any engine answers with the same bits.
        group.router = routing.InTurns()
        spans = [span for sample in samples for span in spans_of(Path(directory), sample)]
        assert len(spans) == sum(len(sample.segments) - 1 for sample in samples)
        answers = [group.generate(span.request(plan(6, MAX_TOKENS))) for span in spans]

        async def compare() -> None:
            for span, answer in zip(spans, answers, strict=True):
                span.compare(await answer)

        loop.wait(group.attend(loop.spawn(compare()), timeout_s=120.0))
        assert all(answer.done() for answer in answers)
        return found
