"""One conversion in a process of its own, for megarl_lab.bench.convert: says `ready` after imports, waits, converts.

mbridge 0.15.1 was written for transformers 4 and Transformer Engine's layers. `_mend` changes what it needs on
transformers 5 with Megatron's local layers, but not how it reads, converts and writes.
"""

import importlib
import resource
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megarl.host.writing import fsync

Convert = Callable[[str, Path, Path, Path], int]


def megarl(option: str) -> Convert:
    """Our converters with `option` processes."""
    from megarl.convert.commands import hf_to_mcore, mcore_to_hf
    from megarl.convert.engine import ConvertSettings

    def convert(direction: str, source: Path, model: Path, out: Path) -> int:
        settings = ConvertSettings(out=out, num_workers=int(option))
        if direction == "hf-to-mcore":
            outcome = hf_to_mcore(source, settings)
        else:
            outcome = mcore_to_hf(source, settings, model=model)
        assert outcome is not None
        return outcome.num_bytes_read

    return convert


def mbridge(option: str) -> Convert:
    """mbridge and Megatron's dist_checkpointing on one rank; `option`: plain, or efficient in memory."""
    from megarl.host.device.platform import apply_environment
    from megarl.parallel.backend import prepare_megatron

    apply_environment()
    prepare_megatron()
    import torch
    import torch.distributed as dist
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    _mend()
    bridges = importlib.import_module("mbridge")
    efficient = option == "efficient"

    def open_bridge(model: Path) -> tuple[Any, list[Any]]:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        parallel_state.initialize_model_parallel()
        model_parallel_cuda_manual_seed(0)
        bridge = bridges.AutoBridge.from_pretrained(str(model), dtype=torch.bfloat16, make_vocab_size_divisible_by=128)
        bridge.hf_config.rope_theta = bridge.hf_config.rope_parameters["rope_theta"]
        # Weights that are overwritten need no random values.
        bridge.set_extra_args(
            use_cpu_initialization=True,
            perform_initialization=False,
            gradient_accumulation_fusion=False,
            masked_softmax_fusion=False,
            persist_layer_norm=False,
            bias_dropout_fusion=False,
        )
        return bridge, bridge.get_model()

    def convert(direction: str, source: Path, model: Path, out: Path) -> int:
        bridge, models = open_bridge(model)
        shards = models[0].module if hasattr(models[0], "module") else models[0]
        if direction == "hf-to-mcore":
            num_bytes = _count_reads()
            bridge.load_weights(models, str(source), memory_efficient=efficient)
            out.mkdir()
            strategy = TorchDistSaveShardedStrategy("torch_dist", 1, thread_count=1)
            dist_checkpointing.save(shards.sharded_state_dict(), str(out), sharded_strategy=strategy)
            return num_bytes[0]
        state = dist_checkpointing.load({"model": shards.sharded_state_dict()}, str(source))
        shards.load_state_dict(state["model"])
        bridge.safetensor_io = bridge._get_safetensor_io(str(model))
        bridge.save_weights(models, str(out), memory_efficient=efficient)
        return sum(file.stat().st_size for file in source.glob("*.distcp"))

    return convert


def _count_reads() -> list[int]:
    """Bytes of the tensors that mbridge asks safetensors for from now on."""
    io = importlib.import_module("mbridge.core.safetensor_io").SafeTensorIO
    load, num_bytes = io.load_some_hf_weight, [0]

    def counted(self: Any, names: list[str]) -> Any:
        tensors = load(self, names)
        num_bytes[0] += sum(tensor.nbytes for tensor in tensors.values())
        return tensors

    io.load_some_hf_weight = counted
    return num_bytes


def _mend() -> None:
    """Local layers and their names in mbridge."""
    from megarl.parallel.modules import local_block_spec
    from megarl.weights.families import read_model_spec

    util: Any = importlib.import_module("mbridge.core.util")
    if not hasattr(util, "correct_amax_history_if_needed"):
        util.correct_amax_history_if_needed = lambda models: None
    base = importlib.import_module("mbridge.core.llm_bridge").LLMBridge
    qwen = importlib.import_module("mbridge.models.qwen2").Qwen2Bridge

    def layer_spec(self: Any, vp_stage: int | None = None) -> Any:
        self.has_vp_stage = True
        return local_block_spec(read_model_spec(self.hf_config.name_or_path), self.config, vp_stage)

    base._get_transformer_layer_spec = layer_spec
    qwen._OTHER_MAPPING = {"input_layernorm.weight": ["model.layers.{layer_number}.input_layernorm.weight"]}
    qwen._MLP_MAPPING = {
        "pre_mlp_layernorm.weight": ["model.layers.{layer_number}.post_attention_layernorm.weight"],
        **qwen._MLP_MAPPING,
    }


def main() -> None:
    kind, option, direction, *paths = sys.argv[1:]
    convert = {"megarl": megarl, "mbridge": mbridge}[kind](option)
    source, model, out = map(Path, paths)
    print("ready", flush=True)
    sys.stdin.readline()
    before = _cpu_seconds()
    num_bytes = convert(direction, source, model, out)
    for file in out.iterdir():
        # Ours has done so; both are timed until what they wrote would survive a crash.
        fsync(file)
    print("read", num_bytes, _cpu_seconds() - before, flush=True)


def _cpu_seconds() -> float:
    """Sum over this process and those that it has started and waited for."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


if __name__ == "__main__":
    main()
