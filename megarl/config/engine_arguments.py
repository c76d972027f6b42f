"""Say which of vLLM's own arguments may be handed to its engines, without importing vLLM.

Each argument of the installed vLLM is named here, so that a later version's new ones are refused until someone has
looked at what they do to weights and samples.
"""

import ast
import functools
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

from megarl.config.suggest import suggest_keys
from megarl.errors import ConfigError

_SEVERAL = "megarl decides where engines and their workers run"
_WEIGHTS = "a weight sync would not know where the engine keeps them"
# Arguments that neither change what the policy is nor where its weights lie: they reach vLLM as they are.
_PASSED = """
    served_model_name enable_prompt_embeds allowed_local_media_path allowed_media_domains download_dir
    safetensors_load_strategy safetensors_prefetch_num_threads safetensors_prefetch_block_size cudagraph_capture_sizes
    max_cudagraph_capture_size ir_op_priority distributed_timeout_seconds cpu_distributed_timeout_seconds
    decode_context_parallel_size dcp_comm_backend dcp_kv_cache_interleave_size cp_kv_cache_interleave_size
    enable_ep_weight_filter moe_backend linear_backend all2all_backend enable_dbo ubatch_size
    dbo_decode_token_threshold dbo_prefill_token_threshold max_parallel_loading_workers prefix_caching_hash_algo
    prefix_cache_retention_interval disable_cascade_attn max_num_batched_tokens max_num_scheduled_tokens
    long_prefill_token_threshold long_prefill_token_threshold_adaptive max_num_active_seqs use_fp64_gumbel
    aggregate_engine_logging disable_custom_all_reduce enable_shm_tensor_arena enable_mm_embeds
    interleave_mm_strings mm_processor_cache_type mm_hasher_algorithm mm_shm_cache_max_object_size_mb mm_encoder_tp_mode
    mm_encoder_attn_backend mm_encoder_attn_dtype mm_encoder_fp8_scale_path mm_encoder_fp8_scale_save_path
    mm_encoder_fp8_scale_save_margin renderer_num_workers skip_mm_profiling video_pruning_rate video_pruning_method
    mm_tensor_ipc mm_ipc_gpu_memory_gb ray_workers_use_nsight
    num_gpu_blocks_override disable_chunked_mm_input scheduler_reserve_full_isl prefill_schedule_interval watermark
    disable_hybrid_kv_cache_manager structured_outputs_config show_hidden_metrics_for_version otlp_traces_endpoint
    collect_detailed_traces per_request_spec_decode_metrics kv_cache_metrics kv_cache_metrics_sample
    custom_histogram_buckets cudagraph_metrics enable_layerwise_nvtx_tracing enable_mfu_metrics
    enable_logging_iteration_details jit_monitor_mode jit_monitor_verbose enable_mm_processor_stats scheduling_policy
    compilation_config attention_config kernel_config enable_flashinfer_autotune profiler_config logging_config
    log_level log_config_file kv_events_config sleep_mode_offload_cudagraph attention_backend
    kv_cache_dtype_skip_layers mamba_block_size prefix_match_unit mamba_cache_mode
    enable_mamba_shared_prefix_checkpoint mamba_backend mamba_ssu_algorithm use_tqdm_on_load pt_load_map_location
    async_scheduling optimization_level performance_mode kv_offloading_size shutdown_timeout fail_on_environ_validation
    gdn_prefill_backend
"""
PASSED = frozenset(_PASSED.split())
# Arguments of which only some values do so.
LIMITED: Mapping[str, tuple[object, ...]] = {
    "load_format": ("auto", "safetensors", "fastsafetensors", "instanttensor", "runai_streamer"),
    "model_impl": ("auto", "vllm"),
    "mamba_cache_dtype": ("auto", "float32"),
    "mamba_ssm_cache_dtype": ("auto", "float32"),
    # Its blocks are dropped at every weight sync; an LMCache server would keep them.
    "kv_offloading_backend": ("native",),
}
# By reason, further arguments that cannot be handed to vLLM.
_REASONS: Mapping[str, str] = {
    "images must be read as the trainer reads them; change preprocessor_config.json in model.path": "media_io_kwargs "
    "mm_processor_kwargs mm_processor_device mm_device_do_normalize",
    "engines must compute the trainer's model; change config.json in model.path": "hf_overrides hf_config_path "
    "model_class_overrides disable_sliding_window config_format",
    "weights are read from model.path, a directory; set model.path": "model_weights revision code_revision "
    "tokenizer_revision hf_token ignore_patterns model_loader_extra_config",
    "a weight sync would be undone, since weights are read again from host memory; set rollout.engine.tp higher": (
        "cpu_offload_gb cpu_offload_params offload_backend offload_group_size offload_num_in_group "
        "offload_prefetch_step offload_params"
    ),
    "other connectors may keep blocks that old weights computed; set kv_offloading_size": "kv_transfer_config",
    "some of its heads would never be sent in a weight sync": "dcp_q_replicate",
    "megarl's weight sync and seeds live in vLLM's own class": "worker_cls scheduler_cls",
    "samples would not come from the policy's distribution, which training assumes; use the settings of rollout": (
        "logits_processors reasoning_parser reasoning_parser_plugin reasoning_config watermark_config "
        "override_generation_config generation_config diffusion_config enable_mamba_cache_stochastic_rounding "
        "mamba_cache_philox_rounds mamba_config io_processor_plugin"
    ),
    "the run's own tokenizer is used; set model.path": "tokenizer_mode tokens_only",
    "no code that comes with a model is run": "trust_remote_code",
    "engines generate": "convert pooler_config mm_encoder_only",
    "megarl takes samples as they grow and does not read it": "return_sampling_mask aux_output_config stream_interval "
    "enable_trace_replay max_num_queued_reqs max_num_queued_tokens",
    "megarl seeds samples on all workers alike": "enable_batch_sharded_sampling",
    "set placement.offload": "sleep_preserve_parameter_names enable_cumem_allocator",
    "set placement.bind_numa": "numa_bind numa_bind_nodes numa_bind_cpus",
    "megarl replaces engines that fail": "enable_fault_tolerance fault_tolerance_config",
    "there is one policy; set actor.lora": "fully_sharded_loras max_cpu_loras default_mm_loras specialize_active_lora "
    "enable_tower_connector_lora enable_mixed_moe_lora_format enable_moe_shared_loras max_lora_cls_labels",
    "set rollout.engine.quantization": "allow_deprecated_quantization",
    "set rollout.engine.num_engines": "elastic_ep_max_dp_size dp_sync_interval disable_nccl_for_dp_synchronization",
    f"experts would move; {_WEIGHTS}": "eplb_config",
    "no model that megarl trains has what it is for": "enable_hc_sp engram_config kv_sharing_fast_prefill "
    "swa_bounded_replay replayssm_buffer_len use_replayssm kda_prefill_backend kda_decode_backend "
    "sparse_indexer_topk_backend ec_transfer_config ec_manager_config",
    "megarl does not know what a plugin makes of it": "additional_config",
}
# By argument, what to set instead or why there is nothing to set.
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
    "language_model_only": "it is on unless prompts have images",
    "limit_mm_per_prompt": "prompts show as many images as data.max_prompt_tokens leaves room for",
    "mm_processor_cache_gb": "megarl itself keeps images as engines read them",
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
    **{name: reason for reason, names in _REASONS.items() for name in names.split()},
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


def check_argument(name: str, value: object, where: str) -> None:
    """Raise ConfigError for an argument that vLLM does not have or that may not be set; `where` is the key above it.

    Values are checked where vLLM declares a plain type; vLLM checks the others when an engine starts.
    """
    if name in REFUSED:
        raise ConfigError(f"{where}.{name}: cannot be set here: {REFUSED[name]}")
    known = known_arguments()
    if name not in known:
        offered = [f"{where}.{other}" for other in known if other in PASSED or other in LIMITED]
        found = suggest_keys(name.replace("-", "_"), where, offered)
        advice = f"did you mean {' or '.join(map(repr, found))}?" if found else "see vLLM's EngineArgs"
        raise ConfigError(f"{where}.{name}: is not an engine argument of the installed vLLM; {advice}")
    if name in LIMITED:
        if value not in LIMITED[name]:
            expected = " or ".join(map(str, LIMITED[name]))
            raise ConfigError(
                f"{where}.{name}: got {value!r}, expected {expected}: others may change the policy or its weights"
            )
    elif name not in PASSED:
        raise ConfigError(
            f"{where}.{name}: cannot be set here: it is new in the installed vLLM, and megarl does not know what it "
            "does to weights and samples; leave it out"
        )
    parts = {part.strip() for part in known[name].split("|")}
    allowed = [each for part in parts for each in _SIMPLE_TYPES.get(part, ())]
    if parts <= _SIMPLE_TYPES.keys() and type(value) not in allowed:
        raise ConfigError(f"{where}.{name}: got {value!r} ({type(value).__name__}), expected {known[name]}")
