"""Fit the constants of `megarl plan` to published times, and print predicted beside published.

    python -m megarl_lab.fit_forecast            # tables, with the constants that megarl has
    python -m megarl_lab.fit_forecast --fit      # fits the constants first, and prints them: seconds

Every row of megarl_lab/published.yaml counts the same. The fit minimizes the sum of squares of ln(predicted/published).
Sources that were left out of a fit say how far it is off elsewhere.
"""

import argparse
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import yaml

from megarl.config.load import PACKAGED
from megarl.config.parse import from_dict
from megarl.config.schema import Config
from megarl.forecast.costs import H100_NODES, Constants, step_cost, sync_seconds, train_parts
from megarl.host.device.platform import assuming
from megarl.plan.sizes import Needs, SizedRun, engine_bytes, plan_engine, size_trainer
from megarl.types import TokenQuantity
from megarl.weights.families import read_model_spec

PUBLISHED = Path(__file__).parent / "published.yaml"
FITTED = ("step_s", "decode_s", "half_tokens", "stage_s")
PROMPT, DEVICE_BYTES, PER_NODE = 100, 80 << 30, 8
# The search halves its steps, in powers of e, down to this one.
_FIRST_STEP, _LAST_STEP = 0.8, 0.005

Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A published time, in seconds, and what predicts it."""

    source: str
    name: str
    seconds: float
    predict: Callable[[Constants], float]

    def ratio(self, constants: Constants) -> float:
        """Return predicted over published."""
        return self.predict(constants) / self.seconds


def read_cases(path: Path = PUBLISHED) -> list[Case]:
    """Read the table of published times."""
    kinds = {"steps": _step, "trainings": _training, "syncs": _sync}
    sources = yaml.safe_load(path.read_text(encoding="utf-8"))
    return [
        make(source, row)
        for source, its in sources.items()
        for kind, make in kinds.items()
        for row in its.get(kind, ())
    ]


def fit(cases: Sequence[Case], start: Constants | None = None) -> Constants:
    """Return the constants with the least sum of squared logarithms of ratios, by a pattern search."""
    best, step = start or Constants(), _FIRST_STEP
    least = _loss(cases, best)
    while step > _LAST_STEP:
        around = [replace(best, **{name: getattr(best, name) * math.exp(s)}) for name in FITTED for s in (step, -step)]
        loss, nearest = min(((_loss(cases, each), each) for each in around), key=lambda pair: pair[0])
        if loss < least:
            least, best = loss, nearest
        else:
            step /= 2
    return best


def spread(cases: Sequence[Case], constants: Constants) -> float:
    """Return by which factor predictions are off: the root mean square of ln(predicted/published), as a power of e."""
    return math.exp(math.sqrt(_loss(cases, constants) / len(cases)))


def table(cases: Sequence[Case], constants: Constants) -> Iterator[str]:
    """Write predicted beside published as Markdown."""
    yield "| source | run | published s | predicted s | ratio |"
    yield "|---|---|---|---|---|"
    for case in cases:
        predicted = case.predict(constants)
        yield f"| {case.source} | {case.name} | {case.seconds:.3g} | {predicted:.3g} | {predicted / case.seconds:.2f} |"


def left_out(cases: Sequence[Case], constants: Constants) -> Iterator[str]:
    """Write, of each source, how far predictions are off with the constants, and with ones fitted without it."""
    yield "| source | rows | off by, fitted to all | off by, fitted without it |"
    yield "|---|---|---|---|"
    for source in dict.fromkeys(case.source for case in cases):
        own = [case for case in cases if case.source == source]
        others = fit([case for case in cases if case.source != source], constants)
        yield f"| {source} | {len(own)} | × {spread(own, constants):.2f} | × {spread(own, others):.2f} |"


def _loss(cases: Sequence[Case], constants: Constants) -> float:
    return sum(math.log(case.ratio(constants)) ** 2 for case in cases)


def _nodes(gpus: int) -> dict[str, int]:
    return {"num_nodes": max(1, gpus // PER_NODE), "devices_per_node": min(PER_NODE, gpus)}


def _layout(trainer: Sequence[int], gpus: int) -> dict[str, Any]:
    tp, cp, ep, pp, *ends = trainer
    sizes = {"tp": tp, "cp": cp, "ep": ep, "pp": pp, "dp": gpus // (tp * cp * pp), "sequence_parallel": tp > 1}
    return sizes | dict(zip(("first_stage_layers", "last_stage_layers"), ends, strict=False))


def _parsed(model: str, settings: Mapping[str, Any], needed: Needs = frozenset()) -> SizedRun:
    directory = PACKAGED / "model" / "hf" / model
    own = {"model": {"path": model, "config_path": str(directory), "dtype": "bfloat16"}}
    config = from_dict(Config, {**own, **settings})
    spec = read_model_spec(directory, model, quantized=("mxfp4", "fp8"))
    engine = plan_engine(config, spec.dims, engine_bytes(config, spec, config.rollout.engine.pp), DEVICE_BYTES)
    return replace(size_trainer(config, spec, needed), engine=engine)


def _step(source: str, row: Row) -> Case:
    (trainers, engines), (prompts, samples), (most, mean) = row["gpus"], row["rows"], row["tokens"]
    (tp, pp), staleness = row["engine"], row.get("staleness", 0)
    engine = {"num_engines": (engines or trainers) // (tp * pp), "tp": tp, "pp": pp, "gpu_memory_utilization": 0.85}
    schedule = {"staleness": staleness, "on_update": "continue" if staleness > 1 else "finish"}
    placement: dict[str, Any] = {"mode": "colocated", "offload": True, "trainer": _nodes(trainers)}
    if engines:
        placement = {"mode": "split", "trainer": _nodes(trainers), "engines": _nodes(engines)}
    run = _parsed(
        row["model"],
        {
            "data": {"train": ["train.parquet"], "max_prompt_tokens": PROMPT, "on_long_prompt": "drop"},
            "trainer": {"total_steps": 1, "prompts_per_step": prompts, "mini_batch_prompts": row["mini"]},
            "rollout": {
                "num_samples": samples,
                "max_response_tokens": most - PROMPT,
                "engine": engine,
                "schedule": schedule,
            },
            "placement": placement,
            "actor": {
                "layout": _layout(row["trainer"], trainers),
                "micro_batch_tokens": most,
                "recompute": "full",
            },
        },
        # The log-probs of all rows are computed once more.
        frozenset([TokenQuantity.OLD_LOGPROBS]),
    )

    @assuming("cuda")
    def predict(constants: Constants) -> float:
        own = replace(constants, mean_share=(mean - PROMPT) / (most - PROMPT))
        return step_cost(run, constants=own).total

    place = f"{trainers} + {engines} GPUs, {staleness} off" if engines else f"{trainers} GPUs"
    return Case(source=source, name=f"step, {row['model']}, {place}", seconds=row["seconds"], predict=predict)


def _training(source: str, row: Row) -> Case:
    gpus, tokens, prompts = row["gpus"], row["tokens"], row["rows"] // 8
    run = _parsed(
        row["model"],
        {
            "data": {"train": ["train.parquet"], "max_prompt_tokens": 1, "on_long_prompt": "drop"},
            "trainer": {"total_steps": 1, "prompts_per_step": prompts, "mini_batch_prompts": prompts},
            "rollout": {"num_samples": 8, "max_response_tokens": tokens - 1, "engine": {"num_engines": gpus}},
            "placement": {"mode": "colocated", "offload": True, "trainer": _nodes(gpus)},
            "actor": {
                "layout": _layout(row["trainer"], gpus),
                "micro_batch_tokens": tokens * row["micro"],
                "recompute": "none",
            },
        },
    )

    @assuming("cuda")
    def predict(constants: Constants) -> float:
        own = replace(constants, mean_share=1.0)
        return sum(train_parts(run, hardware=H100_NODES, constants=own).values())

    seconds = row["rows"] * tokens / gpus / row["tokens_per_s"]
    return Case(source=source, name=f"update, {row['model']}, {gpus} GPUs", seconds=seconds, predict=predict)


def _sync(source: str, row: Row) -> Case:
    num_bytes = row["parameters"] * 1e9 * row.get("bytes", 2)

    def predict(constants: Constants) -> float:
        per_rank, stage = num_bytes / row["ranks"], num_bytes / row["stages"]
        return sync_seconds(per_rank, stage, far=1.0, hardware=H100_NODES, constants=constants)

    return Case(source=source, name=f"sync, {row['model']}", seconds=row["seconds"], predict=predict)


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--fit", action="store_true", help="fit the constants first")
    cases, constants = read_cases(), Constants()
    if parser.parse_args().fit:
        constants = fit(cases)
        print(", ".join(f"{name} {getattr(constants, name):.3g}" for name in FITTED))
    for line in chain(table(cases, constants), [""], left_out(cases, constants)):
        print(line, flush=True)


if __name__ == "__main__":
    main()
