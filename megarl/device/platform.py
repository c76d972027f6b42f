"""CPU or CUDA, decided here and nowhere else: device, backend, layer spec, optimizer, config overrides, RNG.

`platform()` works without importing torch or megatron, so that the driver can set the environment of the
processes it starts. Everything that needs megatron is imported inside the methods that workers call.
"""

import functools
import importlib.metadata
import importlib.util
import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from megarl.errors import ConfigError

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
    from megatron.core.transformer.transformer_config import TransformerConfig

    from megarl.device.accelerators import Device

TESTED_MEGATRON = "0.16.1"

# What every process of a run needs, whatever the device.
COMMON_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    # Engine workers rename themselves; the new name must not overwrite the environment by which they are found.
    "SPT_NOENV": "1",
    # A wait at a store that looks up now and then warns each time.
    "TORCH_CPP_LOG_LEVEL": "ERROR",
}


class Platform(ABC):
    """What differs between devices. `name` is also the torch device type."""

    name: str
    backend: str
    # What vLLM pads the width of a worker's part of an expert to; padded experts cannot take new weights.
    expert_width_multiple: int = 1
    # Whether processes can share memory of a device.
    has_ipc: bool = False

    @abstractmethod
    def environment(self) -> dict[str, str]:
        """Variables to set before the first import of torch, ray or vllm in a process of the run."""

    @abstractmethod
    def prepare(self) -> None:
        """Make this process ready for Megatron-Core; call once, before building anything."""

    @abstractmethod
    def device(self) -> "torch.device":
        """The device of this process."""

    def devices(self) -> "list[Device]":
        """The accelerators of this host, without using them."""
        return []

    def device_index(self) -> int:
        """Which of the devices that this process sees it uses."""
        return 0

    @abstractmethod
    def synchronize(self) -> None:
        """Return when the device has done what this thread asked of it."""

    @abstractmethod
    def new_group(self, store: "dist.Store", rank: int, size: int, timeout: timedelta) -> "dist.ProcessGroup":
        """A process group over the devices' own connections, beside torch's default group; all members at once."""

    @abstractmethod
    def config_overrides(self) -> dict[str, Any]:
        """TransformerConfig fields that depend on the device."""

    @abstractmethod
    def block_spec(self, config: "TransformerConfig", vp_stage: int | None) -> "TransformerBlockSubmodules":
        """The decoder block's layers for this pipeline stage (and model chunk)."""

    def seed(self, seed: int) -> None:
        """Seed torch and Megatron's RNG tracker."""
        import torch
        from megatron.core import tensor_parallel

        torch.manual_seed(seed)
        tensor_parallel.model_parallel_cuda_manual_seed(seed)

    def use_deterministic_algorithms(self, enabled: bool) -> None:
        """Let torch choose algorithms that give equal results for equal inputs; it warns where it has none."""
        import torch

        # cuBLAS reads it when it is first used.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(enabled, warn_only=True)

    def rng_state(self) -> dict[str, Any]:
        """States of torch's generators (host and device) and of Megatron's RNG tracker."""
        import torch
        from megatron.core.tensor_parallel import get_cuda_rng_tracker

        tracker = get_cuda_rng_tracker().get_states()
        return {"host": torch.get_rng_state(), "device": torch.cuda.get_rng_state(), "tracker": tracker}

    def set_rng_state(self, state: dict[str, Any]) -> None:
        """Continue from `rng_state`."""
        import torch
        from megatron.core.tensor_parallel import get_cuda_rng_tracker

        torch.cuda.set_rng_state(state["device"])
        torch.set_rng_state(state["host"])
        get_cuda_rng_tracker().set_states(state["tracker"])

    @abstractmethod
    def device_resources(self) -> dict[str, float]:
        """Ray resources of one device and of the host's share for the processes that use it."""

    @abstractmethod
    def select_devices(self, ids: Sequence[str]) -> None:
        """Narrow this process, before it uses any, to the devices that Ray gave others under these ids."""

    @abstractmethod
    def host_buffer(self, num_bytes: int) -> "torch.Tensor":
        """[num_bytes] uint8 in host memory that a device copies from and to at full speed."""

    @abstractmethod
    def release_cached_memory(self) -> None:
        """Give memory that torch keeps for itself back to the device."""

    @abstractmethod
    def engine_defaults(self) -> dict[str, Any]:
        """vLLM engine arguments where the configuration leaves the choice open."""

    @abstractmethod
    def sleep_arguments(self) -> dict[str, Any]:
        """vLLM engine arguments without which an engine cannot sleep."""

    @abstractmethod
    def sleep_engine(self, llm: Any) -> None:
        """Drop an engine's weights and KV cache."""

    @abstractmethod
    def wake_engine(self, llm: Any, parts: Sequence[str]) -> None:
        """Allocate `weights` (their values come with the next sync) or `kv_cache` again."""


class CpuPlatform(Platform):
    """Gloo, Megatron's local layers with our norm and attention, vLLM's CPU build."""

    name = "cpu"
    backend = "gloo"
    expert_width_multiple = 32

    def environment(self) -> dict[str, str]:
        return COMMON_ENVIRONMENT | {
            "TORCHDYNAMO_DISABLE": "1",
            "OMP_NUM_THREADS": "1",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "CUDA_VISIBLE_DEVICES": "",
            # One host; several need the interface that connects them.
            "GLOO_SOCKET_IFNAME": "lo",
        }

    def prepare(self) -> None:
        import torch

        from megarl.parallel import cpu_shim

        check_megatron()
        torch.set_num_threads(1)
        cpu_shim.install()

    def device(self) -> "torch.device":
        import torch

        return torch.device("cpu")

    def new_group(self, store: "dist.Store", rank: int, size: int, timeout: timedelta) -> "dist.ProcessGroup":
        return gloo_group(store, rank, size, timeout)

    def synchronize(self) -> None:
        """What was asked of it is done already."""

    def config_overrides(self) -> dict[str, Any]:
        return {
            "use_cpu_initialization": True,
            "gradient_accumulation_fusion": False,
            "masked_softmax_fusion": False,
            "persist_layer_norm": False,
            "apply_rope_fusion": False,
            "bias_dropout_fusion": False,
            "bias_activation_fusion": False,
            "attention_softmax_in_fp32": True,
            "deallocate_pipeline_outputs": False,
            "batch_p2p_sync": False,
        }

    def block_spec(self, config: "TransformerConfig", vp_stage: int | None) -> "TransformerBlockSubmodules":
        from megarl.parallel.modules import local_block_spec

        return local_block_spec(config, vp_stage)

    def device_resources(self) -> dict[str, float]:
        # Logical: two ranks and a tensor-parallel engine share two cores.
        return {"CPU": 0.5}

    def select_devices(self, ids: Sequence[str]) -> None:
        """Processes share the host's cores."""

    def host_buffer(self, num_bytes: int) -> "torch.Tensor":
        import torch

        return torch.empty(num_bytes, dtype=torch.uint8)

    def release_cached_memory(self) -> None:
        """The allocator keeps none."""

    def engine_defaults(self) -> dict[str, Any]:
        return {
            "kv_cache_memory_bytes": 64 << 20,
            "block_size": 32,
            "enforce_eager": True,
            # vLLM rewinds a seeded request's generator after a chunk of prefill; CPU generators cannot be rewound.
            "enable_chunked_prefill": False,
        }

    def sleep_arguments(self) -> dict[str, Any]:
        return {}

    def sleep_engine(self, llm: Any) -> None:
        """vLLM's CPU engines do not sleep."""

    def wake_engine(self, llm: Any, parts: Sequence[str]) -> None:
        """vLLM's CPU engines do not sleep."""


class CudaPlatform(Platform):
    """NCCL, Transformer Engine layers where it is installed (the local ones otherwise), vLLM for CUDA."""

    name = "cuda"
    backend = "nccl"
    has_ipc = True

    def environment(self) -> dict[str, str]:
        return COMMON_ENVIRONMENT | {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}

    def prepare(self) -> None:
        import torch

        check_megatron()
        torch.cuda.set_device(self.device())

    def device(self) -> "torch.device":
        import torch

        # Ray narrows CUDA_VISIBLE_DEVICES to the device of this process.
        return torch.device("cuda", 0)

    def new_group(self, store: "dist.Store", rank: int, size: int, timeout: timedelta) -> "dist.ProcessGroup":
        import torch.distributed as dist

        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        # torch's stubs do not say that it is one.
        return cast("dist.ProcessGroup", dist.ProcessGroupNCCL(store, rank, size, options))

    def device_index(self) -> int:
        import torch

        return torch.cuda.current_device()

    def synchronize(self) -> None:
        import torch

        torch.cuda.current_stream().synchronize()

    def devices(self) -> "list[Device]":
        from megarl.device.accelerators import nvidia_devices

        return nvidia_devices()

    @property
    def has_transformer_engine(self) -> bool:
        return importlib.util.find_spec("transformer_engine") is not None

    def config_overrides(self) -> dict[str, Any]:
        fused = self.has_transformer_engine
        return {
            "gradient_accumulation_fusion": importlib.util.find_spec("fused_weight_gradient_mlp_cuda") is not None,
            "masked_softmax_fusion": fused,
            "persist_layer_norm": fused,
            "apply_rope_fusion": fused,
            "moe_grouped_gemm": fused,
            "bias_dropout_fusion": True,
            "bias_activation_fusion": True,
            "attention_softmax_in_fp32": True,
        }

    def block_spec(self, config: "TransformerConfig", vp_stage: int | None) -> "TransformerBlockSubmodules":
        from megarl.parallel.modules import local_block_spec

        if not self.has_transformer_engine:
            return local_block_spec(config, vp_stage)
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

        from megarl.parallel.moe.router import with_pack_routers

        block = get_gpt_decoder_block_spec(config, use_transformer_engine=True, vp_stage=vp_stage)
        with_pack_routers(block.layer_specs)
        return block

    def device_resources(self) -> dict[str, float]:
        return {"CPU": 1, "GPU": 1}

    def select_devices(self, ids: Sequence[str]) -> None:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(ids)

    def host_buffer(self, num_bytes: int) -> "torch.Tensor":
        import torch

        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def release_cached_memory(self) -> None:
        import torch

        torch.cuda.empty_cache()

    def engine_defaults(self) -> dict[str, Any]:
        return {}

    def sleep_arguments(self) -> dict[str, Any]:
        return {"enable_sleep_mode": True}

    def sleep_engine(self, llm: Any) -> None:
        llm.sleep(level=2)

    def wake_engine(self, llm: Any, parts: Sequence[str]) -> None:
        llm.wake_up(tags=list(parts))


PLATFORMS: dict[str, type[Platform]] = {"cpu": CpuPlatform, "cuda": CudaPlatform}


@functools.cache
def platform() -> Platform:
    """This process's platform: MEGARL_DEVICE if set, else CUDA where a driver is and torch is not the CPU build."""
    detected = "cuda" if Path("/dev/nvidiactl").exists() and not _is_cpu_torch() else "cpu"
    name = os.environ.get("MEGARL_DEVICE", detected)
    if name not in PLATFORMS:
        raise ConfigError(f"MEGARL_DEVICE: got {name!r}, expected one of {sorted(PLATFORMS)}")
    return PLATFORMS[name]()


def gloo_group(store: "dist.Store", rank: int, size: int, timeout: timedelta) -> "dist.ProcessGroup":
    """A process group over the hosts' network, beside torch's default group; all members at once."""
    import torch.distributed as dist

    # torch's stubs do not say that it is one.
    return cast("dist.ProcessGroup", dist.ProcessGroupGloo(store, rank, size, timeout))


def _is_cpu_torch() -> bool:
    try:
        return importlib.metadata.version("torch").endswith("+cpu")
    except importlib.metadata.PackageNotFoundError:
        # `megarl doctor` says that it is missing.
        return False


def apply_environment() -> dict[str, str]:
    """Set this process's environment (a value the user exported wins) and return what workers must get."""
    wanted = platform().environment()
    for key, value in wanted.items():
        os.environ.setdefault(key, value)
    return {key: os.environ[key] for key in wanted}


def check_megatron() -> None:
    """Refuse a megatron-core that lacks something we rely on; the tested version passes by definition."""
    version = importlib.metadata.version("megatron-core")
    if version == TESTED_MEGATRON:
        return
    missing = [name for name, present in _probe_megatron() if not present]
    if missing:
        raise ConfigError(
            f"megatron-core {version} lacks {', '.join(missing)}; install the tested megatron-core=={TESTED_MEGATRON}"
        )


def _probe_megatron() -> list[tuple[str, bool]]:
    import inspect

    from megatron.core.distributed import finalize_model_grads
    from megatron.core.models.gpt import GPTModel
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.pipeline_parallel import schedules
    from megatron.core.transformer.transformer_config import TransformerConfig

    fields = TransformerConfig.__dataclass_fields__
    finalize = inspect.signature(finalize_model_grads).parameters
    return [
        ("GPTModel._postprocess(hidden_states)", "hidden_states" in _parameters(GPTModel, "_postprocess")),
        ("GPTModel(pg_collection)", "pg_collection" in inspect.signature(GPTModel.__init__).parameters),
        ("PackedSeqParams.cu_seqlens_q", "cu_seqlens_q" in PackedSeqParams.__dataclass_fields__),
        ("TransformerConfig.calculate_per_token_loss", "calculate_per_token_loss" in fields),
        ("finalize_model_grads(num_tokens)", "num_tokens" in finalize),
        ("schedules.get_forward_backward_func", hasattr(schedules, "get_forward_backward_func")),
    ]


def _parameters(cls: type, method: str) -> set[str]:
    import inspect

    function = getattr(cls, method, None)
    return set(inspect.signature(function).parameters) if function else set()
