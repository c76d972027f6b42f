"""Define the settings of vLLM engines, and which of vLLM's own arguments may be among them, without importing vLLM."""

import ast
import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from megarl.config.setting import AT_LEAST_1, SHARE, Range, section, setting
from megarl.config.suggest import suggest_keys
from megarl.errors import ConfigError

_SEVERAL = "megarl decides where engines and their workers run"
_WEIGHTS = "a weight sync would not know where the engine keeps them"
# Arguments that cannot be handed to vLLM: what to set instead, or why there is nothing to set.
REFUSED: Mapping[str, str] = {
    "model": "set model.path",
    "tokenizer": "the run's own tokenizer is used; set model.path",
    "dtype": "set rollout.engine.dtype",
    "seed": "set run.seed",
    "runner": "engines generate",
    "max_model_len": "set rollout.engine.max_model_tokens",
    "max_num_seqs": "set rollout.engine.max_num_seqs",
    "tensor_parallel_size": "set rollout.engine.tp",
    "gpu_memory_utilization": "set rollout.engine.gpu_memory_utilization",
    "kv_cache_memory_bytes": "set rollout.engine.kv_cache_mib",
    "block_size": "set rollout.engine.block_size",
    "enforce_eager": "set rollout.engine.enforce_eager",
    "enable_prefix_caching": "set rollout.engine.prefix_caching",
    "enable_sleep_mode": "set placement.offload",
    "enable_nccl_comm_suspend": "set placement.suspend_nccl",
    "enable_chunked_prefill": "on CPUs seeded requests need it off, elsewhere vLLM decides",
    "logprobs_mode": "training needs the log-probs of the distribution that was sampled from",
    "max_logprobs": "it follows from rollout.top_k",
    "disable_log_stats": "RUN/metrics.jsonl has the engines' statistics",
    "skip_tokenizer_init": "rollout.stop needs the tokenizer",
    "worker_extension_cls": "it is megarl's weight sync",
    "weight_transfer_config": "megarl syncs weights itself; set sync",
    "distributed_executor_backend": _SEVERAL,
    "nnodes": _SEVERAL,
    "node_rank": _SEVERAL,
    "master_addr": _SEVERAL,
    "master_port": _SEVERAL,
    "device_ids": _SEVERAL,
    "pipeline_parallel_size": "set rollout.engine.pp",
    "prefill_context_parallel_size": "weight syncs do not know its workers; set rollout.engine.tp and pp",
    "data_parallel_size": "set rollout.engine.num_engines",
    "data_parallel_rank": "set rollout.engine.num_engines",
    "data_parallel_start_rank": "set rollout.engine.num_engines",
    "data_parallel_size_local": "set rollout.engine.num_engines",
    "data_parallel_address": _SEVERAL,
    "data_parallel_rpc_port": _SEVERAL,
    "data_parallel_hybrid_lb": _SEVERAL,
    "data_parallel_external_lb": _SEVERAL,
    "data_parallel_multi_port_external_lb": _SEVERAL,
    "data_parallel_backend": _SEVERAL,
    "enable_expert_parallel": "set rollout.engine.expert_parallel",
    "expert_placement_strategy": f"experts would lie on other workers; {_WEIGHTS}",
    "enable_elastic_ep": f"experts would move; {_WEIGHTS}",
    "enable_eplb": f"experts would move; {_WEIGHTS}",
    "enable_return_routed_experts": "set actor.moe.replay_routing",
    "enable_lora": "set actor.lora",
    "max_loras": "there is one policy; set actor.lora",
    "max_lora_rank": "it follows from actor.lora",
    "lora_target_modules": "set actor.lora.targets",
    "lora_dtype": "adapters have the engine's data type; set rollout.engine.dtype",
    "quantization": "set rollout.engine.quantization",
    "quantization_config": "set rollout.engine.quantization",
    "kv_cache_dtype": "set rollout.engine.kv_cache_dtype",
    "speculative_config": "set rollout.engine.speculation",
    "spec_method": "set rollout.engine.speculation.method",
    "spec_model": "there is no drafting model; set rollout.engine.speculation",
    "spec_tokens": "set rollout.engine.speculation.num_tokens",
}
_SIMPLE_TYPES = {"bool": (bool,), "int": (int,), "float": (int, float), "str": (str,), "None": (type(None),)}


@functools.cache
def known_arguments() -> Mapping[str, str]:
    """Return the type of each argument of vLLM's engines by its name, both as the installed package's source says.

    Raises ConfigError without vLLM.
    """
    vllm = find_spec("vllm")
    if vllm is None or vllm.origin is None:
        raise ConfigError("rollout.engine.vllm: is set, but vLLM is not installed, so nothing can check it; install it")
    source = Path(vllm.origin).parent / "engine" / "arg_utils.py"
    module = ast.parse(source.read_text(encoding="utf-8"))
    (cls,) = (node for node in module.body if isinstance(node, ast.ClassDef) and node.name == "EngineArgs")
    fields = (node for node in cls.body if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name))
    types = {ast.unparse(field.target): ast.unparse(field.annotation) for field in fields}
    return {name: hint for name, hint in types.items() if not name.startswith("_")}


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
    # Further engine arguments by vLLM's own names, as in {max_num_batched_tokens: 16384}. Unknown names, and those that
    # follow from other settings, are errors.
    vllm: Mapping[str, Any] = section(dict, needs_trust=True)

    @property
    def num_workers(self) -> int:
        """Return the number of an engine's workers, each on a device."""
        return self.tp * self.pp

    def check(self, key: str) -> None:
        """Raise ConfigError for an argument in `vllm` that vLLM does not have or that is megarl's to set, and for a
        method of drafting that does not suit the stages.

        Values are checked where vLLM declares a plain type; vLLM checks the others when an engine starts.
        """
        if self.speculation.method == "mtp" and self.pp > 1:
            raise ConfigError(
                f"{key}.speculation.method: got mtp with {key}.pp={self.pp}, but megarl does not know which tensors "
                "the stage that drafts then needs; set one of the two otherwise"
            )
        where = f"{key}.vllm"
        for name, value in self.vllm.items():
            if name in REFUSED:
                raise ConfigError(f"{where}.{name}: cannot be set here: {REFUSED[name]}")
            known = known_arguments()
            if name not in known:
                offered = [f"{where}.{other}" for other in known if other not in REFUSED]
                found = suggest_keys(name.replace("-", "_"), where, offered)
                advice = f"did you mean {' or '.join(map(repr, found))}?" if found else "see vLLM's EngineArgs"
                raise ConfigError(f"{where}.{name}: is not an engine argument of the installed vLLM; {advice}")
            parts = {part.strip() for part in known[name].split("|")}
            allowed = [each for part in parts for each in _SIMPLE_TYPES.get(part, ())]
            if parts <= _SIMPLE_TYPES.keys() and type(value) not in allowed:
                raise ConfigError(f"{where}.{name}: got {value!r} ({type(value).__name__}), expected {known[name]}")
