"""Run in a process of its own (`RankPool`): one engine at a time, without a trainer."""

import multiprocessing
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from safetensors.torch import load_file, save_file

from megarl.config.generation import Sampling
from megarl.errors import WeightSyncError
from megarl.rollout.engine import Completion, GenerationRequest, VllmEngine
from megarl.rollout.engine_spec import EngineSpec
from megarl.rollout.pass_hooks import record_pass
from megarl.rollout.stepping import EngineWork
from megarl.types import FloatArray
from megarl.types.passes import PassPlace
from megarl.weights.safetensors_map import map_model
from tests.helpers.rank_pool import RankContext


@contextmanager
def running(spec: EngineSpec) -> Iterator[VllmEngine]:
    """An engine that is gone afterwards, so that the next one can start in the same process."""
    import gc

    from vllm.distributed import cleanup_dist_env_and_memory

    # The engine may have a core or workers that are processes of their own.
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
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
        GenerationRequest(token_ids=tuple(s), seed=0, sampling=Sampling(temperature=0.0), max_tokens=1)
        for s in sequences
    ]
    return [completion.logprobs for completion in engine.generate(greedy)]


def view(_: RankContext, spec: EngineSpec, sequences: Sequence[Sequence[int]]) -> EngineView:
    """Of a new engine on the checkpoint of `spec`."""
    with running(spec) as engine:
        return EngineView(given=engine.prompt_logprobs(sequences), generated=_continue(engine, sequences))


def _load_files(worker: Any, files: Sequence[str]) -> tuple[dict[str, int], str]:
    """In a worker: take the weights of safetensors files through vLLM's reload, as those of a sync."""
    return {}, worker._load(iter(map_model([Path(file) for file in files]).items()))


def load_files(engine: VllmEngine, files: Sequence[str], *, version: int) -> None:
    """Let an engine take the weights of files as those of a sync; only the wire is left out."""
    call = engine.llm.collective_rpc

    def without_wire(method: str, **arguments: Any) -> list[Any]:
        if method == "load_bridge":
            return call(_load_files, kwargs={"files": list(files)})  # type: ignore[no-any-return]
        return [0] if method == "bridge_bytes" else call(method, **arguments)

    with patch.object(engine.llm, "collective_rpc", without_wire):
        engine.receive_over_bridge(0, version=version, with_checksums=False, scales={})


def recorded(_: RankContext, spec: EngineSpec, token_ids: Sequence[int]) -> list[dict[PassPlace, torch.Tensor]]:
    """What a new engine records of a sequence for `megarl bisect`."""
    with running(spec) as engine:
        return record_pass(engine, token_ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reload:
    """An engine before a reload, its work, what it generates if the prefix cache is kept, and after a proper one."""

    before: EngineView
    work: EngineWork
    stale_cache: list[FloatArray]
    after: EngineView


def reload(_: RankContext, spec: EngineSpec, files: Sequence[str], sequences: Sequence[Sequence[int]]) -> Reload:
    """Of an engine on the checkpoint of `spec` that takes the weights of `files`."""
    with running(spec) as engine:
        before = EngineView(given=engine.prompt_logprobs(sequences), generated=_continue(engine, sequences))
        work = engine.work()
        engine.llm.collective_rpc(_load_files, kwargs={"files": list(files)})
        stale_cache = _continue(engine, sequences)
        load_files(engine, files, version=1)
        after = EngineView(given=engine.prompt_logprobs(sequences), generated=_continue(engine, sequences))
    return Reload(before=before, work=work, stale_cache=stale_cache, after=after)


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusals:
    """What an engine says of weights that lack a tensor, by the tensor, and its log-probs before and after all that."""

    errors: dict[str, str]
    before: list[FloatArray]
    after: list[FloatArray]


def refuse(
    _: RankContext, spec: EngineSpec, file: str, edit: str, directory: str, sequences: Sequence[Sequence[int]]
) -> Refusals:
    """Take the weights of `file` without each tensor in turn (or with it renamed), and then as they are."""
    complete, errors = load_file(file), dict[str, str]()
    edited_file = f"{directory}/edited.safetensors"
    with running(spec) as engine:
        before = engine.prompt_logprobs(sequences)
        for name in complete:
            edited = {n: t for n, t in complete.items() if n != name}
            if edit == "renamed":
                edited[name.replace(".weight", "_v2.weight")] = complete[name]
            save_file(edited, edited_file)
            try:
                load_files(engine, [edited_file], version=1)
            except WeightSyncError as error:
                errors[name] = str(error)
        load_files(engine, [file], version=2)
        return Refusals(errors=errors, before=before, after=engine.prompt_logprobs(sequences))


@dataclass(frozen=True, slots=True, kw_only=True)
class Generated:
    """Completions of requests as one batch and one by one, and the decode steps that the latter took."""

    together: list[Completion]
    alone: list[Completion]
    steps_alone: list[int]
    client: str


def generate(_: RankContext, spec: EngineSpec, requests: Sequence[GenerationRequest]) -> Generated:
    """Let a new engine on the checkpoint of `spec` complete requests."""
    with running(spec) as engine:
        together, alone, steps = engine.generate(requests), list[Completion](), list[int]()
        engine.work()
        for request in requests:
            alone += engine.generate([request])
            steps.append(engine.work().num_steps)
        client = type(engine.llm.llm_engine.engine_core).__name__
    return Generated(together=together, alone=alone, steps_alone=steps, client=client)


@dataclass(frozen=True, slots=True, kw_only=True)
class Updated:
    """Completions of requests in whose middle new weights came, and how vLLM's engine was run."""

    completions: list[Completion]
    client: str
    num_processes: int


def update_in_flight(
    _: RankContext, spec: EngineSpec, files: Sequence[str], requests: Sequence[GenerationRequest]
) -> Updated:
    """Complete requests, and take the weights of `files` as version 1 when the first request has finished."""
    found = dict[int, Completion]()
    with running(spec) as engine:
        engine.add(dict(enumerate(requests)))
        for reply in engine.serve():
            if reply.completions and not found:
                load_files(engine, files, version=1)
            found |= reply.completions
            if len(found) == len(requests):
                break
        return Updated(
            completions=[found[i] for i in range(len(requests))],
            client=type(engine.llm.llm_engine.engine_core).__name__,
            num_processes=len(engine.process_ids()),
        )
