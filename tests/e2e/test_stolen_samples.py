"""Two real engines, of which the one that runs idle takes over samples of the other."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from megarl.cluster.cluster import Cluster
from megarl.config.generation import Sampling
from megarl.host import loop
from megarl.rollout import routing
from megarl.rollout.engine import GenerationRequest
from megarl.rollout.regenerate import spans_of
from megarl.rollout.source import SamplingPlan, collect
from megarl.rollout.vllm_source import VllmSource
from megarl.types import SegmentSource
from tests.e2e.support import UnattendedEngines, largest_difference, random_prompts, small_config
from tests.helpers.checkpoints import make_checkpoint
from tests.helpers.loops import begin_groups

NATS = 1e-5
MAX_TOKENS = 320


def plan(num_samples: int, max_tokens: int) -> SamplingPlan:
    sampling = Sampling(temperature=1.0)
    return SamplingPlan(
        step=1,
        num_samples=num_samples,
        sampling=sampling,
        max_response_tokens=max_tokens,
        run_seed=0,
        may_move=True,
    )


# It starts Ray itself, which the default tests of this package share.
@pytest.mark.long
@pytest.mark.timeout(300)
def test_stolen_samples_have_the_log_probs_of_a_forward_pass_and_regenerate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One engine has two short samples and the other six long ones, half of which are to move when it is idle."""

    def running(state: routing.EngineState, most: int) -> list[int]:
        """Do not ask whether it pays: with a model that is so small, it hardly does."""
        return [key for key in state.requests if state.written.get(key)][:most]

    def by_length(requests: Sequence[GenerationRequest], *_: object, **__: object) -> dict[int, int]:
        return {i: int(r.max_tokens > 2) if r.engine is None else r.engine for i, r in enumerate(requests)}

    monkeypatch.setattr(routing, "_paying", running)
    monkeypatch.setattr(routing, "place_requests", by_length)
    engines = "rollout.engine={num_engines: 2, max_num_seqs: 8, kv_cache_mib: 64, block_size: 32}"
    config = small_config(
        make_checkpoint(tmp_path / "model", tied=True),
        engines,
        "placement.mode=split",
        f"rollout.max_response_tokens={MAX_TOKENS}",
    )
    with Cluster(config, with_trainer=False) as cluster:
        group = cluster.engines
        assert isinstance(group.router, routing.ByLoad)
        source = VllmSource(UnattendedEngines(group))
        short, long = random_prompts([8, 8])
        groups = [
            *begin_groups(source, [short], plan(2, 2)),
            *begin_groups(source, [long], plan(6, MAX_TOKENS)),
        ]
        samples = list(collect(source, groups, timeout_s=120.0).samples)
        assert {each.source for s in samples for each in s.segments[1:]} == {SegmentSource.POLICY}
        num_moves = sum(len(s.segments) - 2 for s in samples)
        assert num_moves == group.num_moved >= 1
        sequences = [[*s.prompt_token_ids.tolist(), *s.response_token_ids.tolist()] for s in samples]
        forward = group.prompt_logprobs(sequences)
        given = [each[len(s.prompt_token_ids) - 1 :] for s, each in zip(samples, forward, strict=True)]
        assert largest_difference([s.rollout_logprobs for s in samples], given) <= NATS
        # A token takes 2 · 4 bytes for each of 32 numbers of two heads in two layers; a block may be set aside.
        capacity = (64 << 20) // (2 * 4 * 32 * 2 * 2)
        assert all(capacity - 32 <= load.kv_tokens <= capacity for load in group.router._loads.values())
        # Each segment is a request of its own, which any engine answers with the same bits.
        group.router = routing.InTurns()
        spans = [span for sample in samples for span in spans_of(tmp_path, sample)]
        assert len(spans) == len(samples) + num_moves
        answers = [group.generate(span.request(plan(6, MAX_TOKENS))) for span in spans]

        async def compare() -> None:
            for span, answer in zip(spans, answers, strict=True):
                span.compare(await answer)

        loop.wait(group.attend(loop.spawn(compare()), timeout_s=120.0))
        assert all(answer.done() for answer in answers)
