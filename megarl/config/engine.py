"""Define the settings of vLLM engines."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from megarl.config.engine_arguments import check_argument
from megarl.config.setting import AT_LEAST_1, SHARE, Range, section, setting
from megarl.errors import ConfigError


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

    def check(self, key: str) -> None:
        """Raise ConfigError unless the limits of n-grams are in order."""
        low, high = self.min_ngram_tokens, self.max_ngram_tokens
        if low > high:
            raise ConfigError(
                f"{key}.min_ngram_tokens: got {low}, expected at most max_ngram_tokens={high}; change either"
            )


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
    # Fraction of a device's memory that an engine uses; null: 0.85, or what the trainer leaves where it stays on the
    # device (placement.mode=colocated without offload).
    gpu_memory_utilization: float | None = setting(None, SHARE)
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
    # Further engine arguments by vLLM's own names, as in {max_num_batched_tokens: 16384}. Unknown names are errors, and
    # so are those that follow from other settings or would change the policy.
    vllm: Mapping[str, Any] = section(dict, needs_trust=True)

    @property
    def num_workers(self) -> int:
        """Return the number of an engine's workers, each on a device."""
        return self.tp * self.pp

    def check(self, key: str) -> None:
        """Raise ConfigError for an argument in `vllm` that may not be set, and for a method of drafting that does not
        suit the stages.
        """
        if self.speculation.method == "mtp" and self.pp > 1:
            raise ConfigError(
                f"{key}.speculation.method: got mtp with {key}.pp={self.pp}, but megarl does not know which tensors "
                "the stage that drafts then needs; set one of the two otherwise"
            )
        for name, value in self.vllm.items():
            check_argument(name, value, f"{key}.vllm")
