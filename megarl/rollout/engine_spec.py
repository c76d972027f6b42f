"""Define the settings with which an engine starts, and derive vLLM's arguments from them."""

from dataclasses import dataclass
from pathlib import Path

from megarl.config.engine import EngineConfig
from megarl.config.lora import LoraConfig
from megarl.errors import ConfigError
from megarl.host.device.platform import platform
from megarl.host.reading import MODEL_REMEDY, read_object
from megarl.types.messages import Vision
from megarl.weights.adapters import adapter_spec
from megarl.weights.families import read_model_spec

# The devices on which vLLM supports sleeping.
SLEEPING_DEVICES = frozenset({"cuda"})
# Engine arguments by device, for settings that the configuration leaves open.
_DEFAULTS: dict[str, dict[str, object]] = {
    "cpu": {
        "kv_cache_memory_bytes": 64 << 20,
        "block_size": 32,
        "enforce_eager": True,
        # vLLM rewinds a seeded request's generator after a chunk of prefill; CPU generators cannot be rewound.
        "enable_chunked_prefill": False,
    },
    "cuda": {},
}
# Arguments of engines that read images: `ImagePrompts` keeps these, videos are never read, and pixels are normalised in
# float32, as the trainer's are.
IMAGES = {"mm_processor_cache_gb": 0, "limit_mm_per_prompt": {"video": 0}, "mm_device_do_normalize": False}
# The beginning of the names of `rounded_weights`' methods in vLLM.
ROUNDED = "megarl_"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineNode:
    """One of the nodes over which an engine's workers are spread evenly; those of node 0 have the first ranks.

    address, port: where the workers of all nodes meet, on node 0.
    """

    rank: int
    num_nodes: int
    address: str
    port: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSpec:
    """The settings with which an engine starts; `node` says which part of it starts here if it spans several nodes.

    suspends_nccl: whether NCCL's buffers are freed while the engine sleeps. batch_invariant: whether kernels compute a
    sequence in the same way whatever else is in its batch. captures_routing: whether completions say to which experts
    tokens went. binds: whether the engine's process is bound to the CPUs and the memory next to its devices. lora:
    adapters that syncs send alone, and that the engine adds to the weights that it has read; None: syncs send weights.
    vision: how prompts' images are read, and what of the tower syncs send; None: prompts are texts.
    """

    model_path: str
    dtype: str
    seed: int
    max_model_tokens: int
    config: EngineConfig
    can_sleep: bool = False
    suspends_nccl: bool = False
    max_nucleus: int = 0
    head_tokens: int = 0
    batch_invariant: bool = False
    captures_routing: bool = False
    binds: bool = False
    node: EngineNode | None = None
    lora: LoraConfig | None = None
    vision: Vision | None = None


def rounding_of(spec: EngineSpec) -> str | None:
    """Return the name of the float8 method by which megarl rounds weights before vLLM gets them; None if it does not.

    megarl rounds them on CPUs only, where vLLM has no float8 kernels; on GPUs vLLM itself does it.
    """
    return f"{ROUNDED}{spec.config.quantization}" if spec.config.quantization and platform().name == "cpu" else None


def has_delta_nets(model_path: str) -> bool:
    """Return whether a model directory has gated delta nets, whose prefixes vLLM caches only with chunked prefill."""
    file = Path(model_path) / "config.json"
    config = read_object(file, remedy=MODEL_REMEDY, error=ConfigError) if file.is_file() else {}
    return "linear_num_key_heads" in config.get("text_config", config)


def adapter_arguments(spec: EngineSpec) -> dict[str, object]:
    """Return the arguments that make room for an engine's adapters, in the layers that they belong to.

    If layers were not named, vLLM would make room in the output head too, and then fail on log-probs of prompts.
    """
    if spec.lora is None:
        return {}
    names = adapter_spec(read_model_spec(spec.model_path), spec.lora).expected_tensors(by_expert=True)
    paths = (name.partition(".lora_")[0].split(".") for name in names)
    # All experts are one layer, which is named as what holds them.
    layers = {path[-3] if path[-2].isdigit() else path[-1] for path in paths}
    arguments: dict[str, object] = {
        "enable_lora": True,
        "max_loras": 1,
        "max_lora_rank": spec.lora.engine_rank,
        "lora_target_modules": sorted(layers),
        # Adapters come by expert, also those of models whose files have all experts in one tensor.
        **({"enable_mixed_moe_lora_format": True} if "experts" in layers else {}),
    }
    # All requests have the adapters, so that no graphs are needed without them.
    graphs = {"compilation_config": {"cudagraph_specialize_lora": False}} if platform().name == "cuda" else {}
    return arguments | graphs


def max_logprobs(spec: EngineSpec) -> int:
    """Return how many log-probs of a token an engine gives: vLLM's default, or what nuclei or recorded heads need."""
    return max(20, spec.max_nucleus, spec.head_tokens)


def engine_arguments(spec: EngineSpec) -> dict[str, object]:
    """Return the arguments with which vLLM's engine starts."""
    config, device = spec.config, platform().name
    drafts: dict[str, object] | None = None
    if (wanted := config.speculation).method != "none":
        drafts = {"method": wanted.method, "num_speculative_tokens": wanted.num_tokens}
        if wanted.method == "ngram":
            drafts |= {"prompt_lookup_min": wanted.min_ngram_tokens, "prompt_lookup_max": wanted.max_ngram_tokens}
    chosen: dict[str, object] = {
        "kv_cache_memory_bytes": None if config.kv_cache_mib is None else config.kv_cache_mib << 20,
        "gpu_memory_utilization": config.gpu_memory_utilization,
        "block_size": config.block_size,
        "enforce_eager": config.enforce_eager or None,
        "enable_expert_parallel": config.expert_parallel or None,
        # Inside a Ray actor, vLLM would by default choose its Ray executor, which needs devices of its own.
        "distributed_executor_backend": "mp" if config.num_workers > 1 else None,
        "pipeline_parallel_size": config.pp if config.pp > 1 else None,
        "speculative_config": drafts,
        # vLLM's CPU kernels for float8 need matrix instructions that few CPUs have, and no float32.
        "quantization": rounding_of(spec) or config.quantization,
        # Some models would replicate queries by default, and a weight sync would not send all of these heads.
        "dcp_q_replicate": False if "decode_context_parallel_size" in config.vllm else None,
        "kv_cache_dtype": config.kv_cache_dtype,
    }
    if (node := spec.node) is not None:
        chosen |= {
            "nnodes": node.num_nodes,
            "node_rank": node.rank,
            "master_addr": node.address,
            "master_port": node.port,
        }
    return {
        "model": spec.model_path,
        "dtype": spec.dtype,
        "seed": spec.seed,
        "max_model_len": spec.max_model_tokens,
        "max_num_seqs": config.max_num_seqs,
        "tensor_parallel_size": config.tp,
        "enable_prefix_caching": config.prefix_caching and not (device == "cpu" and has_delta_nets(spec.model_path)),
        # Raw log-probs ignore the temperature, so they would differ from the trainer's.
        "logprobs_mode": "processed_logprobs",
        "max_logprobs": max_logprobs(spec),
        "disable_log_stats": True,
        "skip_tokenizer_init": False,
        # Texts need no vision tower.
        **({"language_model_only": True} if spec.vision is None else IMAGES),
        "worker_extension_cls": "megarl.rollout.worker_extension.WeightReceiver",
        **_DEFAULTS[device],
        **({"enable_return_routed_experts": True} if spec.captures_routing else {}),
        **({"enable_sleep_mode": True} if spec.can_sleep and device in SLEEPING_DEVICES else {}),
        # No sync sends the layer that drafts, so vLLM keeps it on the host.
        **({"sleep_preserve_parameter_names": ["draft.*"]} if spec.can_sleep and wanted.method == "mtp" else {}),
        **({"enable_nccl_comm_suspend": True} if spec.suspends_nccl else {}),
        **adapter_arguments(spec),
        **{key: value for key, value in chosen.items() if value is not None},
        **config.vllm,
    }
