"""Time an engine that replaces its adapters, for `megarl_lab.bench.lora`."""

import multiprocessing
import statistics
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megarl.config.lora import LoraConfig
from megarl.config.schema import EngineConfig
from megarl.host.device.platform import apply_environment
from megarl.rollout.engine_spec import EngineSpec
from megarl.weights.adapter_files import PREFIX
from megarl.weights.adapters import adapter_spec, peft_config
from megarl.weights.families import read_model_spec


@dataclass(frozen=True, slots=True, kw_only=True)
class Replacement:
    """The seconds in which an engine replaces its adapters, by turn."""

    model: str
    rank: int
    num_elements: int
    seconds: tuple[float, ...]

    @property
    def median_ms(self) -> float:
        return 1000 * statistics.median(self.seconds)

    @property
    def ms_per_ten_million(self) -> float:
        return self.median_ms * 1e7 / self.num_elements


def replacements(model: str, path: Path, rank: int, turns: int) -> Replacement:
    """Time an engine of a process of its own that replaces its adapters."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        num_elements, seconds = pool.submit(_replace, str(path), rank, turns).result()
    return Replacement(model=model, rank=rank, num_elements=num_elements, seconds=tuple(seconds))


def _replace(path: str, rank: int, turns: int) -> tuple[int, list[float]]:
    """Start an engine, and replace its adapters in turns, after once that is not timed; return elements and seconds."""
    apply_environment()
    from megarl.rollout.engine import VllmEngine

    config = EngineConfig(num_engines=1, kv_cache_mib=64, block_size=32, max_num_seqs=8)
    lora = LoraConfig(rank=rank, alpha=rank)
    spec = EngineSpec(model_path=path, dtype="float32", seed=0, max_model_tokens=256, config=config, lora=lora)
    engine = VllmEngine(spec)
    try:
        (timed,) = engine.llm.collective_rpc(_timed_replacements, kwargs={"path": path, "rank": rank, "turns": turns})
    finally:
        engine.close()
    num_elements, seconds = timed
    return num_elements, seconds


def _timed_replacements(worker: Any, path: str, rank: int, turns: int) -> tuple[int, list[float]]:
    """Replace adapters in an engine's worker, with tensors as a sync delivers them."""
    import torch

    from megarl.rollout.worker_extension import replace_adapters

    spec, lora, seconds = read_model_spec(path), LoraConfig(rank=rank, alpha=rank), list[float]()
    shapes = adapter_spec(spec, lora).expected_tensors()
    for _ in range(turns + 1):
        tensors = {f"{PREFIX}{name}": torch.randn(shape) for name, shape in shapes.items()}
        begun = time.process_time()
        problem = replace_adapters(worker.model_runner.lora_manager, tensors, peft_config(spec, lora), worker.device)
        seconds.append(time.process_time() - begun)
        assert not problem, problem
    return sum(int(np.prod(shape)) for shape in shapes.values()), seconds[1:]
