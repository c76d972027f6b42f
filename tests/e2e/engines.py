"""Run in a process of its own (`RankPool`): one engine at a time, without a trainer."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from megarl.rollout.engine import EngineSpec, GenerationRequest, VllmEngine
from megarl.types import FloatArray
from tests.helpers.rank_pool import RankContext


@contextmanager
def running(spec: EngineSpec) -> Iterator[VllmEngine]:
    """An engine that is gone afterwards, so that the next one can start in the same process."""
    import gc

    from vllm.distributed import cleanup_dist_env_and_memory

    engine = VllmEngine(spec)
    try:
        yield engine
    finally:
        engine.close()
        del engine.llm
        gc.collect()
        cleanup_dist_env_and_memory()


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineView:
    """Log-probs of given sequences, and of the tokens that follow them greedily."""

    given: list[FloatArray]
    generated: list[FloatArray]


def _continue(engine: VllmEngine, sequences: Sequence[Sequence[int]]) -> list[FloatArray]:
    greedy = [
        GenerationRequest(token_ids=tuple(s), seed=0, temperature=0.0, top_p=1.0, top_k=-1, max_tokens=1)
        for s in sequences
    ]
    return [completion.logprobs for completion in engine.generate(greedy)]


def view(_: RankContext, spec: EngineSpec, sequences: Sequence[Sequence[int]]) -> EngineView:
    """Of a new engine on the checkpoint of `spec`."""
    with running(spec) as engine:
        return EngineView(given=engine.prompt_logprobs(sequences), generated=_continue(engine, sequences))


@dataclass(frozen=True, slots=True, kw_only=True)
class Reload:
    """An engine before a reload; what it generates if the prefix cache is kept; and after a proper one."""

    before: EngineView
    stale_cache: list[FloatArray]
    after: EngineView


def reload(_: RankContext, spec: EngineSpec, files: Sequence[str], sequences: Sequence[Sequence[int]]) -> Reload:
    """Of an engine on the checkpoint of `spec` that takes the weights of `files`."""
    with running(spec) as engine:
        before = EngineView(given=engine.prompt_logprobs(sequences), generated=_continue(engine, sequences))
        engine.llm.collective_rpc("load_files", kwargs={"files": list(files), "with_checksums": False})
        stale_cache = _continue(engine, sequences)
        engine.load_weights(files, version=1, with_checksums=False)
        after = EngineView(given=engine.prompt_logprobs(sequences), generated=_continue(engine, sequences))
    return Reload(before=before, stale_cache=stale_cache, after=after)
