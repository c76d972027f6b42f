"""A vLLM engine, tensor-parallel or not: token ids in, token ids with their log-probs out, weights reloaded in place.

`VllmEngine` is a plain class; Ray actors wrap it, tests use it in an ordinary process. vLLM is imported when the
engine is built, never before.
"""

import os
import pickle
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from megarl.config.schema import Config, EngineConfig
from megarl.device.platform import platform
from megarl.errors import WeightSyncError
from megarl.sync.wire.wires import Share
from megarl.types import FinishReason, FloatArray, IntArray


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """One sample to draw."""

    token_ids: tuple[int, ...]
    seed: int
    temperature: float
    top_p: float
    top_k: int
    max_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """What the engine wrote. `logprobs` are the processed ones: after temperature and truncation. All [n].

    weight_versions: of each token, the weights that chose it.
    """

    token_ids: IntArray
    logprobs: FloatArray
    finish_reason: FinishReason
    weight_versions: IntArray


@dataclass(frozen=True, slots=True, kw_only=True)
class Received:
    """What a worker received over the bridge: checksums by tensor, if asked for, and bytes over the wire."""

    checksums: Mapping[str, int]
    wire_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSpec:
    """What it takes to start an engine."""

    model_path: str
    dtype: str
    seed: int
    max_model_tokens: int
    config: EngineConfig
    can_sleep: bool = False


def engine_spec(config: Config) -> EngineSpec:
    """Derive the engine's settings from a run's configuration.

    Where the context length is left open, it covers the longest prompt and response.
    """
    needed = config.data.max_prompt_tokens + config.rollout.max_response_tokens
    engine = config.rollout.engine
    if config.run.deterministic:
        # A cached prefix is computed in other batches than a new one, and depends on what ran before.
        engine = replace(engine, prefix_caching=False)
    return EngineSpec(
        model_path=config.model.path,
        dtype=config.model.dtype,
        seed=config.run.seed,
        max_model_tokens=engine.max_model_tokens or needed,
        config=engine,
        can_sleep=config.placement.offload,
    )


class Stepper:
    """Runs a `vllm.LLM` for threads that wait for their requests, and lets another thread hold it between steps."""

    def __init__(self, llm: Any) -> None:
        self._llm = llm
        self._turn = threading.Condition()
        self._holders = 0
        self._finished: dict[str, Any] = {}

    def finish(self, prompts: Sequence[Any], params: Sequence[Any]) -> list[Any]:
        """Wait for all prompts, and return vLLM's outputs in their order."""
        found = {i: output for part in self.stream(prompts, params) for i, output in part.items()}
        return [found[i] for i in range(len(prompts))]

    def stream(self, prompts: Sequence[Any], params: Sequence[Any]) -> Iterator[dict[int, Any]]:
        """Yield vLLM's outputs by the positions of their prompts, each as soon as it has finished."""
        with self._turn:
            queued = self._llm.enqueue(prompts, params, use_tqdm=False)
        # vLLM adds a random end to the ids that its outputs have.
        positions = {request_id.partition("-")[0]: i for i, request_id in enumerate(queued)}
        while positions:
            with self._turn:
                # A holder that has come to wait goes first: the lock alone would be taken here again at once.
                self._turn.wait_for(lambda: self._holders == 0)
                if not positions.keys() & self._finished.keys():
                    outputs = self._llm.llm_engine.step()
                    self._finished |= {output.request_id: output for output in outputs if output.finished}
                ids = positions.keys() & self._finished.keys()
                part = {positions.pop(request_id): self._finished.pop(request_id) for request_id in ids}
            if part:
                yield part

    @contextmanager
    def held(self) -> Iterator[bool]:
        """No step is taken within; unfinished requests are kept. Tells whether there are any."""
        self._holders += 1
        with self._turn:
            busy = self._llm.llm_engine.has_unfinished_requests()
            if busy:
                self._llm.sleep(level=0, mode="keep")
            try:
                yield busy
            finally:
                if busy:
                    self._llm.wake_up(tags=["scheduling"])
                self._holders -= 1
                self._turn.notify_all()


class VllmEngine:
    """One vLLM engine in this process; with tp > 1 its workers are children of it.

    Weights may be replaced while another thread waits in `generate`: unfinished requests are kept, their keys and
    values are dropped, and they go on by the new weights as if these had read all of their tokens so far.
    """

    def __init__(self, spec: EngineSpec) -> None:
        from vllm import LLM

        self.llm = LLM(**_engine_arguments(spec))
        self.llm.update_weight_version("0")
        self._stepper = Stepper(self.llm)

    def process_ids(self) -> list[int]:
        """Return the ids of this process and of the workers that are processes of their own."""
        workers: list[int] = self.llm.collective_rpc("process_id")
        return list(dict.fromkeys([os.getpid(), *workers]))

    def generate(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        """Generate all completions and return them in request order."""
        found = {i: completion for part in self.stream(requests) for i, completion in part.items()}
        return [found[i] for i in range(len(requests))]

    def stream(self, requests: Sequence[GenerationRequest]) -> Iterator[dict[int, Completion]]:
        """Yield completions by the positions of their requests, as soon as a step of the engine has finished them."""
        from vllm import SamplingParams, TokensPrompt
        from vllm.sampling_params import RequestOutputKind

        prompts = [TokensPrompt(prompt_token_ids=list(r.token_ids)) for r in requests]
        params = [
            SamplingParams(
                n=1,
                temperature=r.temperature,
                top_p=r.top_p,
                top_k=r.top_k,
                max_tokens=r.max_tokens,
                seed=r.seed,
                logprobs=0,
                detokenize=False,
                output_kind=RequestOutputKind.FINAL_ONLY,
            )
            for r in requests
        ]
        for part in self._stepper.stream(prompts, params):
            completions: dict[int, Completion] = {}
            for position, output in part.items():
                sampled, spans = output.outputs[0], output.outputs[0].weight_versions
                # One entry per position: only the sampled token's log-prob was asked for.
                logprobs = [at[token].logprob for at, token in zip(sampled.logprobs, sampled.token_ids, strict=True)]
                versions = np.asarray([int(span.version) for span in spans], dtype=np.int64)
                completions[position] = Completion(
                    token_ids=np.asarray(sampled.token_ids, dtype=np.int64),
                    logprobs=np.asarray(logprobs, dtype=np.float32),
                    finish_reason=FinishReason(sampled.finish_reason),
                    weight_versions=np.repeat(versions, [span.end - span.start for span in spans]),
                )
            yield completions

    def prompt_logprobs(self, sequences: Sequence[Sequence[int]]) -> list[FloatArray]:
        """Log-probs (temperature 1) of tokens 1… of each sequence under the current weights."""
        from vllm import SamplingParams, TokensPrompt

        # The prefix cache must not skip positions: prompt log-probs need every one computed.
        params = SamplingParams(max_tokens=1, prompt_logprobs=0, temperature=0.0)
        prompts = [TokensPrompt(prompt_token_ids=list(s)) for s in sequences]
        outputs = self._stepper.finish(prompts, [params] * len(prompts))
        return [
            np.asarray(
                [position[token].logprob for position, token in zip(o.prompt_logprobs[1:], s[1:], strict=True)],
                dtype=np.float32,
            )
            for o, s in zip(outputs, sequences, strict=True)
        ]

    def open_bridge(self, shares: Sequence[Share]) -> None:
        """Let every worker join the bridge from the trainer's ranks as a sink, with a share each."""
        # As bytes: between processes vLLM carries only plain types.
        self.llm.collective_rpc("open_bridge", kwargs={"shares": [pickle.dumps(share) for share in shares]})

    def receive_over_bridge(
        self, transfer: int, *, version: int, with_checksums: bool, scales: Mapping[str, float]
    ) -> list[Received]:
        """Replace the weights by what the trainer's ranks send at the same time, each worker what it needs.

        scales: of the tensors that travel with one.

        Raises:
            WeightSyncError: a tensor is missing, unknown, or did not fill its parameter.
        """
        arguments = {"transfer": transfer, "with_checksums": with_checksums, "scales": dict(scales)}
        with self._stepper.held() as busy:
            results = self.llm.collective_rpc("load_bridge", kwargs=arguments)
            problems = list(dict.fromkeys(problem for _, problem in results if problem))
            if problems:
                raise WeightSyncError("; ".join(problems))
            # Cached keys and values belong to the old weights, those of unfinished requests too.
            if not self.llm.reset_prefix_cache(reset_running_requests=busy):
                raise WeightSyncError("vLLM did not reset its prefix cache after a sync")
            self.llm.update_weight_version(str(version))
        wire_bytes = self.llm.collective_rpc("bridge_bytes")
        return [Received(checksums=c, wire_bytes=n) for (c, _), n in zip(results, wire_bytes, strict=True)]

    def sleep(self) -> None:
        """Drop weights and KV cache where the device can; `wake` both before generating."""
        if platform().name in _SLEEPING_DEVICES:
            self.llm.sleep(level=2)

    def wake(self, parts: Sequence[str]) -> None:
        """Bring back `weights`, which the next sync fills, or `kv_cache`."""
        if platform().name in _SLEEPING_DEVICES:
            self.llm.wake_up(tags=list(parts))

    def close(self) -> None:
        """Stop the engine and the processes it started."""
        self.llm.llm_engine.engine_core.shutdown()


# vLLM's engines sleep on these devices.
_SLEEPING_DEVICES = frozenset({"cuda"})
# Engine arguments by device where the configuration leaves the choice open.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "cpu": {
        "kv_cache_memory_bytes": 64 << 20,
        "block_size": 32,
        "enforce_eager": True,
        # vLLM rewinds a seeded request's generator after a chunk of prefill; CPU generators cannot be rewound.
        "enable_chunked_prefill": False,
    },
    "cuda": {},
}


def _engine_arguments(spec: EngineSpec) -> dict[str, Any]:
    config, device = spec.config, platform().name
    chosen: dict[str, Any] = {
        "kv_cache_memory_bytes": None if config.kv_cache_mib is None else config.kv_cache_mib << 20,
        "block_size": config.block_size,
        "enforce_eager": config.enforce_eager or None,
        # Inside a Ray actor vLLM would choose its Ray executor, which needs a GPU and devices of its own.
        "distributed_executor_backend": "mp" if config.tp > 1 else None,
    }
    return {
        "model": spec.model_path,
        "dtype": spec.dtype,
        "seed": spec.seed,
        "max_model_len": spec.max_model_tokens,
        "max_num_seqs": config.max_num_seqs,
        "tensor_parallel_size": config.tp,
        "gpu_memory_utilization": config.gpu_memory_utilization,
        "enable_prefix_caching": config.prefix_caching,
        # Raw log-probs ignore the temperature and would differ from the trainer's.
        "logprobs_mode": "processed_logprobs",
        "disable_log_stats": True,
        "skip_tokenizer_init": False,
        "worker_extension_cls": "megarl.rollout.worker_extension.WeightReceiver",
        **_DEFAULTS[device],
        **({"enable_sleep_mode": True} if spec.can_sleep and device in _SLEEPING_DEVICES else {}),
        **{key: value for key, value in chosen.items() if value is not None},
    }
