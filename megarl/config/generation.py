"""Define the sections for rollouts, vLLM engines, placement, weight syncs and validation."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from megarl.config.setting import AT_LEAST_0, AT_LEAST_1, FRACTION, POSITIVE, SHARE, Range, section, setting


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationConfig:
    """Configure speculative decoding: tokens are drafted, and the policy accepts or replaces them in one pass.

    Samples are distributed as without it, and their log-probs are the policy's.
    """

    # ngram: draft what followed the last tokens where they occurred before; mtp: draft with the model's own layer for
    # multi-token prediction, which is not trained.
    method: Literal["none", "ngram", "mtp"] = "none"
    num_tokens: int = setting(3, Range(expected="in 1 .. 128", at_least=1, at_most=128))  # Tokens drafted at a time.
    min_ngram_tokens: int = setting(2, AT_LEAST_1)  # With ngram: how many of the last tokens must occur again.
    max_ngram_tokens: int = setting(4, AT_LEAST_1)  # With ngram: the most of the last tokens to look for.


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Configure the vLLM engines, which all have the same settings; null leaves a choice to vLLM."""

    num_engines: int = setting(1, AT_LEAST_1)  # Number of engines; each holds a full copy of the policy.
    tp: int = setting(1, AT_LEAST_1)  # Tensor-parallel size of each engine.
    # Number of pipeline stages of each engine. Its tp × pp workers lie on one node, or fill several.
    pp: int = setting(1, AT_LEAST_1)
    # Data type in which engines hold weights and compute; null: model.dtype.
    dtype: Literal["float32", "bfloat16"] | None = None
    # With experts: let each of an engine's tp workers hold whole experts instead of a slice of each; on CUDA only.
    expert_parallel: bool = False
    max_num_seqs: int = setting(256, AT_LEAST_1)  # Maximum number of sequences that an engine decodes concurrently.
    max_model_tokens: int | None = setting(None, AT_LEAST_1)  # Context length; null: the longest possible row.
    kv_cache_mib: int | None = setting(None, AT_LEAST_1)  # Size of the KV cache per device.
    gpu_memory_utilization: float = setting(0.6, SHARE)  # Fraction of a device's memory that an engine uses.
    block_size: int | None = setting(None, AT_LEAST_1)  # Tokens per block of the KV cache.
    enforce_eager: bool = False  # Disable CUDA graphs.
    prefix_caching: bool = True  # Share the KV cache of common prompt prefixes.
    # Round the matrices of layers to float8 at every weight sync, by vLLM's method of this name: with one scale per
    # matrix, per output, or per block of 128 × 128. Needs algo.correction. On CPUs, layers compute with rounded
    # weights in model.dtype; on CUDA, activations are rounded too.
    quantization: Literal["fp8_per_tensor", "fp8_per_channel", "fp8_per_block"] | None = None
    # Data type of the KV cache; null: model.dtype. float8 needs algo.correction; on CPUs, AVX-512 or AMX too.
    kv_cache_dtype: Literal["fp8_e4m3", "fp8_e5m2"] | None = None
    speculation: SpeculationConfig = field(default_factory=SpeculationConfig)
    # Further engine arguments by vLLM's own names, as in {max_num_batched_tokens: 16384}. Unknown names, and those that
    # follow from other settings, are errors.
    vllm: Mapping[str, Any] = section(dict, needs_trust=True)

    @property
    def num_workers(self) -> int:
        """Return the number of an engine's workers, each on a device."""
        return self.tp * self.pp


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleConfig:
    """Configure how far generation may run ahead of training."""

    # Weight updates that may come between the admission of a prompt and the start of the step that trains on its
    # samples; 0: synchronous, engines wait while the trainer works.
    staleness: int = setting(0, AT_LEAST_0)
    # finish: before new weights come, engines finish all samples; continue: unfinished samples go on with the new
    # weights, and each token knows the version that sampled it.
    on_update: Literal["finish", "continue"] = "finish"
    # Share of the (staleness + 1) · trainer.prompts_per_step prompts under way within which a finished group may train
    # before an older one. 0: strict order.
    window_frac: float = setting(0.0, FRACTION)

    def window(self, prompts_per_step: int) -> int:
        """Return `window_frac` in prompts; 1: strict order."""
        return max(1, int(self.window_frac * (self.staleness + 1) * prompts_per_step))


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How the tokens of a response are sampled; `temperature` 0 means greedy.

    stop, stop_token_ids: texts and tokens that end a response, which includes them.
    """

    temperature: float
    top_p: float = 1.0
    top_k: int = -1
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()

    def greedy(self) -> "Sampling":
        """Return the greedy choice of tokens with the same ends."""
        return replace(self, temperature=0.0, top_p=1.0, top_k=-1)


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutConfig:
    """Configure how responses are sampled."""

    # vllm: generate with vLLM; replay: use the samples that an earlier run recorded; regenerate: use them, and check
    # that the engines sample each of them again with equal tokens and log-probs.
    source: Literal["vllm", "replay", "regenerate"] = "vllm"
    num_samples: int = setting(8, AT_LEAST_1)  # Samples per prompt: the group size.
    # Sampling temperature; all log-probs in training use it too.
    temperature: float = setting(1.0, POSITIVE, affects=("engines",))
    # Nucleus sampling threshold; below 1, training needs a limit by top_k too. Log-probs in training are those of the
    # distribution over the tokens that top_k and top_p left to sample from.
    top_p: float = setting(1.0, SHARE, affects=("engines",))
    # Number of most likely tokens to sample from; in training, at least 2.
    top_k: int = setting(-1, Range(expected=">= 1, or -1 for no limit", at_least=1, also=-1), affects=("engines",))
    max_response_tokens: int = setting(1024, AT_LEAST_1)  # Maximum response length; longer responses are truncated.
    stop: tuple[str, ...] = ()  # Texts that end a response, such as </answer>; the response ends with the text.
    # Tokens that end a response, besides those by which the model ends an answer (docs/data.md).
    stop_token_ids: tuple[int, ...] = setting((), AT_LEAST_0)
    # Time limit of one call to the trainer's ranks, and of the time in which no engine finishes a sample.
    timeout_s: float = setting(3600.0, POSITIVE, affects=("workers",))
    # Number of engine crashes that a run survives: each time the unfinished samples are generated again, and the engine
    # is restarted.
    max_engine_restarts: int = setting(3, AT_LEAST_0)
    record: bool = False  # Record every step's rollout under RUN/records, for replay.
    replay_dir: str | None = None  # RUN/records of the run to replay or to regenerate.
    engine: EngineConfig = section(EngineConfig, affects=("engines", "workers"))
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)

    def sampling(self, stop_token_ids: tuple[int, ...]) -> Sampling:
        """Return how responses are sampled, which these tokens end."""
        return Sampling(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            stop=self.stop,
            stop_token_ids=stop_token_ids,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class NodesConfig:
    """Set the number of nodes over which a group of processes is distributed evenly."""

    num_nodes: int = setting(1, AT_LEAST_1)  # Number of nodes.
    # Devices used on each node; null: as many as the processes need.
    devices_per_node: int | None = setting(None, AT_LEAST_1)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementConfig:
    """Choose whether engines share the trainer's devices (colocated) or have their own (split)."""

    # colocated: engines run on the trainer's devices; split: they have devices of their own.
    mode: Literal["colocated", "split"] = "colocated"
    trainer: NodesConfig = field(default_factory=NodesConfig)
    # Nodes of the engines; only with mode=split.
    engines: NodesConfig = field(default_factory=NodesConfig)
    # With mode=colocated: move the trainer's state to host memory while engines generate, and put engines to
    # sleep while the trainer works.
    offload: bool = False
    # With offload, on CUDA: also free the buffers of NCCL's communicators, of the trainer while all of its state is in
    # host memory and of engines while they sleep. Requires NCCL 2.29.7.
    suspend_nccl: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncConfig:
    """Configure how the policy's weights are sent from the trainer to the engines after every update."""

    verify: bool = False  # Compare checksums of every tensor on both sides after each sync; slow, for debugging.
    # Connection between hosts. gloo: the network; device: the devices' own links (NCCL), with
    # placement.mode=colocated between the trainer's ranks, which pass on what their engines lack. Within a host,
    # weights go through shared memory.
    host_group: Literal["gloo", "device"] = setting("gloo", affects=("workers",))
    # Data type to which weights are cast for the transfer; null: no cast. float8_e4m3 has one
    # scale per matrix and is expanded to float32 before vLLM loads it, so engines sample from less precise
    # weights than the trainer's.
    dtype: Literal["bfloat16", "float8_e4m3"] | None = setting(None, affects=("workers",))
    # Send only the elements that changed, without loss. This takes host memory for a copy of the
    # transferred weights on each side, and time to compare and verify.
    delta: bool = setting(False, affects=("workers",))
    # With delta: every this many syncs, send all elements.
    delta_full_every: int = setting(50, AT_LEAST_1, affects=("workers",))
    # Ranks and engine workers on the same device exchange weights in device memory instead of host memory; null:
    # on CUDA. This takes up to two messages of 128 MiB of device memory per pair.
    cuda_ipc: bool | None = setting(None, affects=("workers",))


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidationConfig:
    """Configure validation on data.val: `num_samples` sampled answers to each prompt, and a greedy one if `greedy`."""

    before_train: bool = True  # Also validate the initial policy.
    # Steps between validations; the last step is always validated.
    every_steps: int = setting(10, Range(expected=">= 1 (data.val=[] skips validation)", at_least=1))
    num_samples: int = setting(1, AT_LEAST_1)  # Sampled answers per prompt.
    pass_at: tuple[int, ...] = setting((), AT_LEAST_1)  # Report pass@k for these k, at most num_samples.
    # Temperature of the sampled answers.
    temperature: float = setting(1.0, Range(expected="> 0 (validation.greedy=true is argmax)", above=0))
    top_p: float = setting(1.0, SHARE)  # Nucleus sampling threshold of the sampled answers.
    # Number of most likely tokens to sample from.
    top_k: int = setting(-1, Range(expected=">= 1, or -1 for no limit", at_least=1, also=-1))
    max_response_tokens: int | None = setting(None, AT_LEAST_1)  # Maximum length; null: rollout.max_response_tokens.
    greedy: bool = True  # Also score one greedy answer per prompt.
    # Use only the first prompts of data.val, at most this many; null: all.
    max_prompts: int | None = setting(None, AT_LEAST_1)
