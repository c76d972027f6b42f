"""CPU or CUDA, decided here and nowhere else: device, backend, layer spec, optimizer, config overrides, RNG.

`platform()` works without importing torch or megatron, so that the driver can set the environment of the
processes it starts. Everything that needs megatron is imported inside the methods that workers call.
"""

import functools
import importlib.metadata
import importlib.util
import os
from abc import ABC, abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megarl.errors import ConfigError

if TYPE_CHECKING:
    import torch
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
    from megatron.core.transformer.transformer_config import TransformerConfig

TESTED_MEGATRON = "0.16.1"

# What every process of a run needs, whatever the device.
COMMON_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
}


class Platform(ABC):
    """What differs between devices. `name` is also the torch device type."""

    name: str
    backend: str

    @abstractmethod
    def environment(self) -> dict[str, str]:
        """Variables to set before the first import of torch, ray or vllm in a process of the run."""

    @abstractmethod
    def prepare(self) -> None:
        """Make this process ready for Megatron-Core; call once, before building anything."""

    @abstractmethod
    def device(self) -> "torch.device":
        """The device of this process."""

    @abstractmethod
    def config_overrides(self) -> dict[str, Any]:
        """TransformerConfig fields that depend on the device."""

    @abstractmethod
    def block_spec(self, config: "TransformerConfig") -> "TransformerBlockSubmodules":
        """The decoder block's layers for this pipeline stage."""

    @abstractmethod
    def seed(self, seed: int) -> None:
        """Seed torch and Megatron's RNG tracker."""

    @abstractmethod
    def bundle(self) -> dict[str, float]:
        """Ray resources of one device, which a trainer rank and an engine may share."""

    @abstractmethod
    def actor_options(self) -> dict[str, float]:
        """Ray options of a process that takes half of a device's bundle."""

    @abstractmethod
    def engine_defaults(self) -> dict[str, Any]:
        """vLLM engine arguments where the configuration leaves the choice open."""


class CpuPlatform(Platform):
    """Gloo, Megatron's local layers with our norm and attention, vLLM's CPU build."""

    name = "cpu"
    backend = "gloo"

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

    def block_spec(self, config: "TransformerConfig") -> "TransformerBlockSubmodules":
        from megarl.parallel.modules import local_block_spec

        return local_block_spec(config)

    def seed(self, seed: int) -> None:
        _seed(seed)

    def bundle(self) -> dict[str, float]:
        return {"CPU": 1}

    def actor_options(self) -> dict[str, float]:
        return {"num_cpus": 0.5}

    def engine_defaults(self) -> dict[str, Any]:
        return {
            "kv_cache_memory_bytes": 64 << 20,
            "block_size": 32,
            "enforce_eager": True,
            # vLLM rewinds a seeded request's generator after a chunk of prefill; CPU generators cannot be rewound.
            "enable_chunked_prefill": False,
        }


class CudaPlatform(Platform):
    """NCCL, Transformer Engine layers where it is installed (the local ones otherwise), vLLM for CUDA."""

    name = "cuda"
    backend = "nccl"

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
            "bias_dropout_fusion": True,
            "bias_activation_fusion": True,
            "attention_softmax_in_fp32": True,
        }

    def block_spec(self, config: "TransformerConfig") -> "TransformerBlockSubmodules":
        from megarl.parallel.modules import local_block_spec

        if not self.has_transformer_engine:
            return local_block_spec(config)
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

        return get_gpt_decoder_block_spec(config, use_transformer_engine=True)

    def seed(self, seed: int) -> None:
        _seed(seed)

    def bundle(self) -> dict[str, float]:
        return {"CPU": 1, "GPU": 1}

    def actor_options(self) -> dict[str, float]:
        return {"num_cpus": 0.5, "num_gpus": 0.5}

    def engine_defaults(self) -> dict[str, Any]:
        return {}


PLATFORMS: dict[str, type[Platform]] = {"cpu": CpuPlatform, "cuda": CudaPlatform}


@functools.cache
def platform() -> Platform:
    """This process's platform: MEGARL_DEVICE if set, else CUDA where a driver is and torch is not the CPU build."""
    cpu_build = importlib.metadata.version("torch").endswith("+cpu")
    detected = "cuda" if Path("/dev/nvidiactl").exists() and not cpu_build else "cpu"
    name = os.environ.get("MEGARL_DEVICE", detected)
    if name not in PLATFORMS:
        raise ConfigError(f"MEGARL_DEVICE: got {name!r}, expected one of {sorted(PLATFORMS)}")
    return PLATFORMS[name]()


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


def _seed(seed: int) -> None:
    import torch
    from megatron.core import tensor_parallel

    torch.manual_seed(seed)
    tensor_parallel.model_parallel_cuda_manual_seed(seed)
