"""Check the arguments that `rollout.engine.vllm` hands to vLLM, without importing vLLM."""

import ast
import functools
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

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
    "dtype": "set model.dtype",
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
    "pipeline_parallel_size": "weight syncs know tensor-parallel workers only; set rollout.engine.tp",
    "prefill_context_parallel_size": "weight syncs know tensor-parallel workers only; set rollout.engine.tp",
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
    "enable_expert_parallel": f"experts would lie on other workers; {_WEIGHTS}",
    "enable_elastic_ep": f"experts would move; {_WEIGHTS}",
    "enable_eplb": f"experts would move; {_WEIGHTS}",
    "enable_lora": "all weights are trained",
}
_SIMPLE_TYPES = {"bool": (bool,), "int": (int,), "float": (int, float), "str": (str,), "None": (type(None),)}


@functools.cache
def engine_arguments() -> Mapping[str, str]:
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
        known = engine_arguments()
        if name not in known:
            offered = [f"{_WHERE}.{other}" for other in known if other not in REFUSED]
            found = suggest_keys(name.replace("-", "_"), _WHERE, offered)
            advice = f"did you mean {' or '.join(map(repr, found))}?" if found else "see vLLM's EngineArgs"
            raise ConfigError(f"{_WHERE}.{name}: is not an engine argument of the installed vLLM; {advice}")
        parts = {part.strip() for part in known[name].split("|")}
        allowed = [each for part in parts for each in _SIMPLE_TYPES.get(part, ())]
        if parts <= _SIMPLE_TYPES.keys() and type(value) not in allowed:
            raise ConfigError(f"{_WHERE}.{name}: got {value!r} ({type(value).__name__}), expected {known[name]}")
