"""Check how engines round weights and draft tokens, and the arguments that vLLM gets, without importing vLLM."""

import ast
import functools
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

from megarl.config.check_experts import NUM_EXPERTS
from megarl.config.schema import Config
from megarl.config.suggest import suggest_keys
from megarl.errors import ConfigError

_WHERE = "rollout.engine.vllm"
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
    "enable_lora": "all weights are trained",
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
        raise ConfigError(f"{_WHERE}: is set, but vLLM is not installed, so nothing can check it; install it")
    source = Path(vllm.origin).parent / "engine" / "arg_utils.py"
    module = ast.parse(source.read_text(encoding="utf-8"))
    (cls,) = (node for node in module.body if isinstance(node, ast.ClassDef) and node.name == "EngineArgs")
    fields = (node for node in cls.body if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name))
    types = {ast.unparse(field.target): ast.unparse(field.annotation) for field in fields}
    return {name: hint for name, hint in types.items() if not name.startswith("_")}


def check_engine_arguments(config: Config) -> None:
    """Raise ConfigError for an argument in `rollout.engine.vllm` that vLLM does not have, or that is megarl's to set.

    Values are checked where vLLM declares a plain type; vLLM checks the others when an engine starts.
    """
    for name, value in config.rollout.engine.vllm.items():
        if name in REFUSED:
            raise ConfigError(f"{_WHERE}.{name}: cannot be set here: {REFUSED[name]}")
        known = known_arguments()
        if name not in known:
            offered = [f"{_WHERE}.{other}" for other in known if other not in REFUSED]
            found = suggest_keys(name.replace("-", "_"), _WHERE, offered)
            advice = f"did you mean {' or '.join(map(repr, found))}?" if found else "see vLLM's EngineArgs"
            raise ConfigError(f"{_WHERE}.{name}: is not an engine argument of the installed vLLM; {advice}")
        parts = {part.strip() for part in known[name].split("|")}
        allowed = [each for part in parts for each in _SIMPLE_TYPES.get(part, ())]
        if parts <= _SIMPLE_TYPES.keys() and type(value) not in allowed:
            raise ConfigError(f"{_WHERE}.{name}: got {value!r} ({type(value).__name__}), expected {known[name]}")


def check_speculation(config: Config) -> None:
    """Raise ConfigError for drafts that cannot be made, or that would not survive sleep."""
    speculation = config.rollout.engine.speculation
    low, high = speculation.min_ngram_tokens, speculation.max_ngram_tokens
    if low > high:
        raise ConfigError(
            f"rollout.engine.speculation.min_ngram_tokens: got {low}, expected at most max_ngram_tokens={high}; change "
            "either"
        )
    if speculation.method == "mtp" and config.rollout.engine.pp > 1:
        raise ConfigError(
            f"rollout.engine.speculation.method: got mtp with rollout.engine.pp={config.rollout.engine.pp}, but "
            "megarl does not know which tensors the stage that drafts then needs; set one of the two otherwise"
        )
    if speculation.method == "mtp" and config.placement.offload:
        raise ConfigError(
            "rollout.engine.speculation.method: got mtp with placement.offload=true, but the layer that drafts is lost "
            "when engines sleep, and no weight sync brings it back; set one of the two otherwise"
        )


def check_quantization(config: Config) -> None:
    """Raise ConfigError for engines that compute in less precision than the trainer, unless something corrects that."""
    engine, sync = config.rollout.engine, config.sync
    for name, value in (("quantization", engine.quantization), ("kv_cache_dtype", engine.kv_cache_dtype)):
        if value is not None and config.algo.correction.name == "none" and config.rollout.source == "vllm":
            raise ConfigError(
                f"rollout.engine.{name}: got {value} with algo.correction.name=none, but then nothing corrects for "
                "samples of a less precise policy; set algo.correction.name, as in algo.correction.name=tis_upper"
            )
    if engine.quantization is not None and sync.dtype == "float8_e4m3":
        raise ConfigError(
            f"sync.dtype: got float8_e4m3 with rollout.engine.quantization={engine.quantization}, so that weights "
            "would be rounded twice, to different scales; set sync.dtype=null or rollout.engine.quantization=null"
        )


def check_engine_model(config: Config, hf_config: Mapping[str, object], *, on_cpu: bool) -> None:
    """Raise ConfigError for drafts without a layer for them, and for what engines cannot do with experts or without."""
    engine, has_experts = config.rollout.engine, any(hf_config.get(name) for name in NUM_EXPERTS)
    if engine.speculation.method == "mtp" and not hf_config.get("num_nextn_predict_layers"):
        raise ConfigError(
            "rollout.engine.speculation.method: got mtp, but config.json has no num_nextn_predict_layers, so no layer "
            "predicts further tokens; set it to ngram or none"
        )
    if on_cpu and engine.quantization is not None and has_experts:
        raise ConfigError(
            f"rollout.engine.quantization: got {engine.quantization} for a model with experts, whose weights are not "
            "rounded on CPUs; set it to null"
        )
    if engine.expert_parallel and (on_cpu or not has_experts or engine.tp == 1):
        why = (
            "vLLM's CPU build ends by a segmentation fault with it"
            if on_cpu
            else "the model has no experts"
            if not has_experts
            else "rollout.engine.tp=1 leaves a single worker to hold them"
        )
        raise ConfigError(f"rollout.engine.expert_parallel: got true, but {why}; set it to false")
