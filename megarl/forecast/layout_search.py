"""Describe what `megarl plan` is asked: a model on GPUs, with settings that are given and others to choose."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from megarl.config.batches import max_path_tokens
from megarl.config.given import GivenSettings
from megarl.config.load import PACKAGED, overridden, with_overrides
from megarl.config.parse import from_dict
from megarl.config.schema import Config
from megarl.errors import ConfigError
from megarl.forecast.costs import Constants, Hardware
from megarl.plan.recompute import ENGINE_SHARE
from megarl.plan.sizes import engine_bytes, plan_engine
from megarl.weights.families import ModelSpec, read_model_spec

PUBLISHED = PACKAGED / "model" / "hf"
# A step of rows in proportion to the GPUs, but at least this many prompts; a quarter of them per optimizer step.
_PROMPTS_PER_GPU, _LEAST_PROMPTS, _MINI_BATCHES = 8, 256, 4
SIZES, MOST_STAGES = (1, 2, 4, 8, 16, 32, 64), 16


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutSearch(GivenSettings):
    """The question to the search: a model on `gpus` devices with `device_bytes` each, `per_node` to a node.

    num_stages: an engine's, one on each of its nodes. stage_bytes: what `engine_bytes` counts.
    """

    spec: ModelSpec
    num_stages: int
    stage_bytes: int
    gpus: int
    per_node: int
    device_bytes: int
    hardware: Hardware
    constants: Constants


def new_search(
    model: str,
    *,
    gpus: int,
    per_node: int,
    device_gib: float,
    overrides: Sequence[str] = (),
    calibration: Path | None = None,
) -> LayoutSearch:
    """Describe a search. model: a directory with a config.json, or a name or hub id of which a config.json comes with
    megarl.
    """
    if gpus < 1 or per_node < 1 or (gpus > per_node and gpus % per_node) or not 0 < device_gib < math.inf:
        raise ConfigError(
            f"--gpus {gpus} --gpus-per-node {per_node} --device-gib {device_gib:g}: expected at least one GPU, whole "
            "nodes if there are several, and some memory; change one of them"
        )
    directory = Path(model)
    if not (directory / "config.json").is_file():
        directory = PUBLISHED / directory.name.lower()
    if not (directory / "config.json").is_file():
        known = ", ".join(sorted(path.name for path in PUBLISHED.iterdir()))
        raise ConfigError(f"--model: got {model!r}, expected a directory with a config.json, or one of {known}")
    prompts = max(_LEAST_PROMPTS, _PROMPTS_PER_GPU * gpus)
    tree = {
        "model": {"path": model, "config_path": str(directory), "dtype": "bfloat16"},
        "data": {"train": ["train.parquet"], "max_prompt_tokens": 1024, "on_long_prompt": "drop"},
        "rollout": {"num_samples": 8, "max_response_tokens": 4096},
        "trainer": {"total_steps": 1, "prompts_per_step": prompts, "mini_batch_prompts": prompts // _MINI_BATCHES},
        "actor": {"micro_batch_tokens": 16384},
    }
    spec, base = read_model_spec(directory, "--model"), with_overrides(from_dict(Config, tree), overrides)
    device_bytes, given = int(device_gib * 2**30), overridden(overrides)
    if base.actor.recompute == "auto":
        given -= {"actor.recompute"}
    constants = Constants()
    if calibration is not None:
        # Calibration plans a run, which takes torch.
        from megarl.forecast.calibrate import calibrate

        constants = calibrate(calibration, device_bytes=device_bytes)
    settings = GivenSettings(base=base, given=given)
    num_stages = _num_stages(settings, spec, gpus=gpus, per_node=per_node, device_bytes=device_bytes)
    return LayoutSearch(
        base=base,
        given=given,
        spec=spec,
        num_stages=num_stages,
        stage_bytes=engine_bytes(base, spec, num_stages),
        gpus=gpus,
        per_node=per_node,
        device_bytes=device_bytes,
        hardware=Hardware(per_node=per_node),
        constants=constants,
    )


def _num_stages(settings: GivenSettings, spec: ModelSpec, *, gpus: int, per_node: int, device_bytes: int) -> int:
    """Choose the number of an engine's stages: the fewest with room for a row, or else the most that the GPUs allow."""
    base = settings.base
    if "rollout.engine.pp" in settings.given:
        return base.rollout.engine.pp
    counts = [n for n in SIZES if n == 1 or (per_node in SIZES and gpus % (n * per_node) == 0)]
    for num_stages in (n for n in counts if n <= min(spec.dims.num_layers, MOST_STAGES)):
        engine_settings = replace(
            base.rollout.engine, tp=min(gpus, per_node), pp=num_stages, gpu_memory_utilization=ENGINE_SHARE
        )
        config = replace(base, rollout=replace(base.rollout, engine=engine_settings))
        stage_bytes = engine_bytes(base, spec, num_stages)
        engine = plan_engine(config, spec.dims, stage_bytes, device_bytes)
        if (engine.kv_cache or 0) >= engine.kv_bytes_per_token * max_path_tokens(base):
            break
    return num_stages
