"""Import vLLM into a process that will have an engine, with what it reads in the environment set before."""

import json
import os
import sys
from importlib.machinery import ModuleSpec
from importlib.util import find_spec, module_from_spec
from itertools import accumulate

from megarl.errors import ConfigError
from megarl.host.device.platform import platform
from megarl.host.stage import logged_stages, process_files, tell_stage
from megarl.host.temp_dir import is_private
from megarl.rollout.engine_spec import EngineSpec, rounding_of
from megarl.vision.torchvision_part import import_torchvision


def prepare_vllm(spec: EngineSpec) -> None:
    """Import vLLM, with the environment that it reads, and then the extensions that the engine needs.

    Raises ConfigError if this host's CPU cannot store keys and values in float8.
    """
    if spec.batch_invariant:
        # Kernels read it while they are imported.
        os.environ["VLLM_BATCH_INVARIANT"] = "1"
    tell_stage("importing vLLM")
    if spec.vision is not None:
        import_torchvision()
    import_vllm()
    if platform().name == "cpu" and spec.config.kv_cache_dtype and not has_float8_keys():
        raise ConfigError(
            f"rollout.engine.kv_cache_dtype: got {spec.config.kv_cache_dtype}, but on this host vLLM would need a CPU "
            "with AVX-512 or AMX for it; set it to null"
        )
    lend_torchvision()
    if rounding_of(spec):
        import megarl.rollout.rounded_weights  # noqa: F401


def import_vllm() -> None:
    """Import vLLM, with its messages told as stages of this process, or of one that is forked and calls this again."""
    if is_private(process_files()):
        # vLLM's core and workers may be processes of their own; all read this file, while the engine starts.
        file = process_files() / f"{os.getpid()}-vllm-logging.json"
        stages = logged_stages("vllm", level=os.environ.get("VLLM_LOGGING_LEVEL", "WARNING"))
        file.write_text(json.dumps(stages), encoding="utf-8")
        os.environ.setdefault("VLLM_LOGGING_CONFIG_PATH", str(file))
    from vllm import LLM  # noqa: F401


def lend_torchvision() -> None:
    """Put empty modules in the place of torchvision, whose functions texts never need, where it is not installed."""
    from vllm.model_executor.models import registry

    lent = find_spec("torchvision") is None
    if lent:
        from transformers.utils import is_torchvision_available

        is_torchvision_available()  # It keeps the answer.
        for name in accumulate(("torchvision", ".transforms", ".v2", ".functional")):
            sys.modules[name] = module_from_spec(ModuleSpec(name, None, is_package=True))
    if lent or platform().name == "cpu":
        # vLLM looks at a model's class in another process, to leave CUDA alone. That one has neither these modules nor
        # torchvision's Python part, unless a cache in the user's home knows the answer.
        registry._run_in_subprocess = lambda inspect: inspect()


def has_float8_keys() -> bool:
    """Return whether vLLM has float8 attention for this host's CPU."""
    import torch

    return torch.cpu._is_avx512_supported() or torch.cpu._is_amx_tile_supported()
