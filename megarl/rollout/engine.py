"""Wrap a vLLM engine: it turns token ids into completions with log-probs, and reloads its weights in place.

`VllmEngine` is a plain class, which Ray actors wrap and tests use in an ordinary process. vLLM is imported only when
the engine is built.
"""

import os
import pickle
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from megarl.config.generation import Sampling
from megarl.errors import WeightSyncError
from megarl.host.device.platform import platform
from megarl.host.stage import tell_stage
from megarl.rollout.engine_spec import SLEEPING_DEVICES, EngineSpec, engine_arguments
from megarl.rollout.images import EnginePrompt, ImagePrompts, salted, text_prompt
from megarl.rollout.nucleus import head_of, nucleus_of
from megarl.rollout.prepare import prepare_vllm
from megarl.rollout.stepping import EngineLoad, EngineWork, Stepper
from megarl.types import (
    ExpertArray,
    FinishReason,
    FloatArray,
    IdArray,
    IntArray,
    LikelyTokens,
    NucleusArray,
    VersionSpan,
    token_versions,
)
from megarl.types.images import RowImage
from megarl.types.seeds import span_seed
from megarl.weights.adapters import peft_config
from megarl.weights.families import read_model_spec

if TYPE_CHECKING:
    from vllm import RequestOutput, SamplingParams

    from megarl.sync.transport.transports import ProcessPlan

# By vLLM's name, why a request has ended that it finished; `Stepper` has repeated those that ended with an error.
FINISH_REASONS = {
    reason.value: reason
    for reason in (FinishReason.STOP, FinishReason.LENGTH, FinishReason.ABORT, FinishReason.REPETITION)
}
# A worker needs these of a request to seed it anew; they are names in vLLM's `extra_args`.
SEED, NUM_BEFORE = "megarl_seed", "megarl_num_before"
# By what vLLM knows the policy's adapters, which come from memory.
ADAPTERS_ID, ADAPTERS_NAME = 1, "policy"


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """A request for one completion of a prompt.

    num_before: how many of the last `token_ids` an engine sampled for the same sample before; the request goes on with
    the sample. with_nucleus: return the tokens that top_k and top_p left to sample each token from; `top_k` bounds
    their number. head_tokens: return so many of the likeliest tokens, too; with a nucleus, those in it. engine: the
    index of the engine that has the keys and values of earlier tokens; None: none has. may_move: whether another engine
    may go on with tokens of this one, which takes a new seed. num_routed: how many of the first `token_ids` have known
    experts, which the engine leaves out where it captures experts. images: what `token_ids` show. whose: the sample's
    name, for messages. cache_salt: only requests of the same salt share keys and values in the prefix cache.
    """

    token_ids: tuple[int, ...]
    seed: int
    sampling: Sampling
    max_tokens: int
    num_before: int = 0
    with_nucleus: bool = False
    head_tokens: int = 0
    engine: int | None = None
    may_move: bool = False
    num_routed: int = 0
    images: tuple[RowImage, ...] = ()
    whose: str = "prompt"
    cache_salt: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """The tokens that an engine generated for a request, in arrays [n]; of an unfinished request, those so far.

    logprobs: after temperature and truncation (top-p, top-k). versions: those of the weights that sampled the tokens;
    `weight_versions` has one for each token. routed_experts: [tokens, layers, k] of the request's tokens after the
    first `num_routed`, and of the generated ones but the last, if the engine captures them. engine: the index of the
    engine on which the sample goes on: the one that generated them, or that takes over. num_cached: how many of the
    request's tokens the prefix cache had.
    """

    token_ids: IdArray
    logprobs: FloatArray
    finish_reason: FinishReason
    versions: tuple[VersionSpan, ...]
    nucleus: NucleusArray | None = None
    head: LikelyTokens | None = None
    routed_experts: ExpertArray | None = None
    engine: int | None = None
    num_cached: int = 0

    @property
    def weight_versions(self) -> IntArray:
        return token_versions(self.versions)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineReply:
    """A reply of an engine's stream: requests that have finished, by the caller's ids, and what is left to do."""

    load: EngineLoad
    completions: Mapping[int, Completion] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Received:
    """A worker's receipt for a weight sync: checksums by tensor, if asked for, and the number of bytes sent."""

    checksums: Mapping[str, int]
    wire_bytes: int


class VllmEngine:
    """One vLLM engine in this process; with tp > 1 its workers are child processes, or those of `EngineNodeWorkers`.

    Weights may be replaced while another thread waits in `generate` or `serve`. Unfinished requests then continue with
    the new weights: their KV cache is dropped, and computed again for all of their tokens so far. Their generators get
    the seed `span_seed(seed, tokens so far)`, so that a continuation can be sampled again as a request of its own.
    """

    def __init__(self, spec: EngineSpec) -> None:
        prepare_vllm(spec)
        from vllm import LLM

        self.llm = LLM(**engine_arguments(spec))
        tell_stage("")
        self._num_nodes = 1 if spec.node is None else spec.node.num_nodes
        self.llm.update_weight_version("0")
        self._version = 0
        self._completion = partial(_completion)
        self._adapters = None if spec.lora is None else peft_config(read_model_spec(spec.model_path), spec.lora)
        self._tower, self._prompt = spec.vision and spec.vision.train, text_prompt
        if spec.vision is not None:
            self._prompt = ImagePrompts(self.llm.llm_engine.renderer, Path(spec.vision.store)).prompt
        # vLLM counts them with regard to layers of several kinds.
        kv_tokens = self.llm.llm_engine.vllm_config.cache_config.kv_cache_size_tokens
        self._stepper = Stepper(
            self.llm,
            max_num_seqs=spec.config.max_num_seqs,
            kv_tokens=kv_tokens,
            reads_images=spec.vision is not None,
        )

    def process_ids(self) -> list[int]:
        """Return the ids of this process, and of workers and vLLM's core if they are processes of this host."""
        every: list[int] = self.llm.collective_rpc("process_id")
        resources = getattr(self.llm.llm_engine.engine_core, "resources", None)
        cores = [] if resources is None else [core.pid for core in resources.engine_manager.processes]
        return list(dict.fromkeys([os.getpid(), *every[: len(every) // self._num_nodes], *cores]))

    def generate(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        """Generate all completions and return them in request order."""
        return [self._completion(output) for output in self._stepper.finish(*self._inputs(requests))]

    def add(self, requests: Mapping[int, GenerationRequest]) -> None:
        """Queue requests, each by an id of the caller's, and return at once; `serve` yields their completions."""
        self._stepper.add(list(requests), *self._inputs(list(requests.values())))

    def serve(self) -> Iterator[EngineReply]:
        """Yield the completion of each added request by its id, as soon as it has finished, until `close`.

        The first reply, and others while the engine is busy, have none; they tell of its load.
        """
        for part, load in self._stepper.serve():
            completions = {key: self._completion(output) for key, output in part.items()}
            yield EngineReply(load=load, completions=completions)

    def unfinished(self) -> dict[int, Completion]:
        """Return the tokens so far of each added request that is not finished and has any, by its id; all go on."""
        outputs = self._stepper.unfinished().items()
        return {key: self._completion(output) for key, output in outputs if output.outputs[0].token_ids}

    def abort(self) -> None:
        """Forget all added requests that are not finished."""
        self._stepper.abort()

    def take_out(self, ids: Collection[int]) -> dict[int, Completion | None]:
        """Forget added requests; return the tokens so far of those that were not finished, None if there are none."""
        outputs = self._stepper.abort(ids)
        return {key: self._completion(each) if each.outputs[0].token_ids else None for key, each in outputs.items()}

    def work(self) -> EngineWork:
        """Return what the engine did since the last call."""
        work, self._stepper.work = self._stepper.work, EngineWork()
        return work

    def _inputs(self, requests: Sequence[GenerationRequest]) -> "tuple[list[EnginePrompt], list[SamplingParams]]":
        """Return the prompts and sampling parameters of requests for vLLM."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        # Those of a run have the same distributions recorded, or none, as validations do.
        if recorded := next((r for r in requests if r.with_nucleus or r.head_tokens), None):
            self._completion = partial(_completion, truncates=recorded.with_nucleus, has_head=recorded.head_tokens > 0)
        vocab_size = self.llm.model_config.get_vocab_size()
        params = [
            SamplingParams(
                n=1,
                temperature=r.sampling.temperature,
                top_p=r.sampling.top_p,
                top_k=r.sampling.top_k,
                max_tokens=r.max_tokens,
                seed=span_seed(r.seed, r.num_before),
                stop=list(r.sampling.stop),
                stop_token_ids=list(r.sampling.stop_token_ids),
                # The sampled token comes first, then the likeliest ones.
                logprobs=min(r.sampling.top_k if r.with_nucleus else r.head_tokens, vocab_size),
                # Otherwise vLLM makes an object for each of these numbers.
                flat_logprobs=True,
                # vLLM looks for stop strings in the text, of which special tokens may be part.
                detokenize=bool(r.sampling.stop),
                skip_special_tokens=False,
                output_kind=RequestOutputKind.FINAL_ONLY,
                extra_args={SEED: r.seed, NUM_BEFORE: r.num_before},
                routed_experts_prompt_start=r.num_routed,
            )
            for r in requests
        ]
        return [salted(self._prompt(r.token_ids, r.images, r.whose), r.cache_salt) for r in requests], params

    def prompt_logprobs(
        self, sequences: Sequence[Sequence[int]], images: Sequence[Sequence[RowImage]] = ()
    ) -> list[FloatArray]:
        """Return log-probs of each sequence's tokens but the first under the current weights, at temperature 1.

        images: those that each sequence shows; empty: none does.
        """
        from vllm import SamplingParams

        # Prompt log-probs make vLLM compute every position, so the prefix cache skips none.
        params = SamplingParams(max_tokens=1, prompt_logprobs=0, temperature=0.0)
        shown = zip(sequences, images or [()] * len(sequences), strict=True)
        prompts = [self._prompt(s, each, "sequence") for s, each in shown]
        outputs = self._stepper.finish(prompts, [params] * len(prompts))
        return [
            np.asarray(
                [position[token].logprob for position, token in zip(o.prompt_logprobs[1:], s[1:], strict=True)],
                dtype=np.float32,
            )
            for o, s in zip(outputs, sequences, strict=True)
        ]

    def open_bridge(self, shares: "Sequence[ProcessPlan]") -> None:
        """Make every worker join the weight sync as a receiver; `shares` has each worker's part of the plan."""
        # Pickled, because vLLM only passes plain types between its processes.
        self.llm.collective_rpc("open_bridge", kwargs={"shares": [pickle.dumps(share) for share in shares]})

    def receive_over_bridge(
        self, transfer: int, *, version: int, with_checksums: bool, scales: Mapping[str, float]
    ) -> list[Received]:
        """Replace the weights, or the adapters alone, by those that the trainer's ranks are sending; each worker
        receives what it needs.

        scales: the scale of each tensor that is sent in float8.

        Raises:
            WeightSyncError: a tensor is missing, unknown, or did not fill its parameter.
        """
        method, further = "load_bridge", {"scales": dict(scales), "tower": self._tower}
        if self._adapters is not None:
            method, further = "load_adapters", {"peft": self._adapters}
        arguments = {"transfer": transfer, "with_checksums": with_checksums, **further}
        with self._stepper.held() as busy:
            results = self.llm.collective_rpc(method, kwargs=arguments)
            problems = list(dict.fromkeys(problem for _, problem in results if problem))
            if problems:
                raise WeightSyncError("; ".join(problems))
            if self._adapters is not None:
                from vllm.lora.request import LoRARequest

                self._stepper.adapters = LoRARequest(ADAPTERS_NAME, ADAPTERS_ID, lora_path=ADAPTERS_NAME)
            # Cached keys and values were computed with the old weights, also those of unfinished requests.
            if not self.llm.reset_prefix_cache(reset_running_requests=busy, reset_connector=True):
                raise WeightSyncError("vLLM did not reset its prefix cache after a sync")
            if self._tower not in (None, "none"):
                # So were the features of images.
                self.llm.llm_engine.reset_encoder_cache()
            if busy and version != self._version:
                self._stepper.work.recomputed_tokens += max(self.llm.collective_rpc("reseed"))
            self.llm.update_weight_version(str(version))
            self._version = version
        wire_bytes = self.llm.collective_rpc("bridge_bytes")
        return [Received(checksums=c, wire_bytes=n) for (c, _), n in zip(results, wire_bytes, strict=True)]

    def sleep(self) -> bool:
        """Drop KV cache and weights, except those that no sync sends again; return whether weights are gone."""
        level = 1 if self._adapters is not None or self._tower in ("none", "projector") else 2
        if sleeps := platform().name in SLEEPING_DEVICES:
            self.llm.sleep(level=level)
        return sleeps and level == 2

    def wake(self, parts: Sequence[str]) -> None:
        """Allocate memory again for `weights`, which the next sync fills unless they were kept, or for `kv_cache`."""
        if platform().name in SLEEPING_DEVICES:
            self.llm.wake_up(tags=list(parts))

    def close(self) -> None:
        """Stop the engine and the processes it started."""
        self._stepper.close()
        self.llm.llm_engine.engine_core.shutdown()


def _completion(output: "RequestOutput", *, truncates: bool = True, has_head: bool = False) -> Completion:
    """Turn vLLM's output into a completion. RuntimeError if it ended for a reason that megarl does not know.

    truncates: further log-probs are those of a nucleus, not of the whole vocabulary. has_head: keep them all.
    """
    sampled = output.outputs[0]
    if sampled.finish_reason not in FINISH_REASONS:
        raise RuntimeError(
            f"vLLM ended a request with finish_reason={sampled.finish_reason!r}, expected one of "
            f"{', '.join(FINISH_REASONS)}; install the vLLM that megarl requires"
        )
    num_tokens, spans = len(sampled.token_ids), sampled.weight_versions
    # Each position has the sampled token, then the likeliest.
    shape = num_tokens, len(sampled.logprobs.token_ids) // num_tokens
    ids = np.asarray(sampled.logprobs.token_ids, dtype=np.int32).reshape(shape)
    every = np.asarray(sampled.logprobs.logprobs, dtype=np.float32).reshape(shape)
    nucleus, logprobs, head = None, every[:, 0], None
    if shape[1] > 1 and truncates:
        nucleus, logprobs, head = nucleus_of(ids, every)
    elif shape[1] > 1:
        head = head_of(ids, every)
    return Completion(
        token_ids=np.asarray(sampled.token_ids, dtype=np.int32),
        logprobs=logprobs,
        nucleus=nucleus,
        head=head if has_head else None,
        routed_experts=None if sampled.routed_experts is None else sampled.routed_experts.astype(np.int16),
        finish_reason=FINISH_REASONS[sampled.finish_reason],
        versions=tuple(VersionSpan(int(span.version), span.end - span.start) for span in spans),
        num_cached=output.num_cached_tokens or 0,
    )
