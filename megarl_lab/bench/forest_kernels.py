"""Measure updates on trees of conversations on a GPU, by the kernel that computes attention, against flattened rows.

python -m megarl_lab.bench.forest_kernels --json kernels.json
python -m megarl_lab.bench.forest_kernels --device cpu --tokens 2048    # to see that it runs

The model has layers of the sizes of Qwen3-8B's, and nearly no vocabulary. Trees are those of `megarl_lab.bench.forest`,
of about --tokens different tokens, which are one micro-batch; flattened, their rows are one after the other in several.
A line is a tree: the time of an update of flattened rows in milliseconds, and of rows that share prefixes over it, for
the layers of Transformer Engine and for megarl's own; and what FLOPs allow. Each time is the median of --repeats.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from megarl.host.device.platform import apply_environment, platform
from megarl.record.text_table import align
from megarl.types import Row
from megarl.types.messages import LoadRequest, Role, RoleSpec
from megarl.types.prefixes import counted_once
from megarl_lab.bench.forest import SHAPES, OneRank


@dataclass(frozen=True, slots=True)
class KernelWay:
    """Whose layers a model has, and what computes attention where rows share prefixes."""

    transformer_engine: bool
    attention: Literal["gathered", "flex"]


WAYS = {
    "te": KernelWay(True, "gathered"),
    "te flex": KernelWay(True, "flex"),
    "torch": KernelWay(False, "gathered"),
    "flex": KernelWay(False, "flex"),
}


def tree(shape: str, sharing: int, vocab: int, tokens: int) -> list[Row]:
    """Make a tree of about that many different tokens."""

    def unique(rows: Sequence[Row]) -> int:
        return sum(row.num_tokens - row.num_uncounted for row in counted_once(rows))

    return SHAPES[shape](sharing, vocab, max(1, tokens // unique(SHAPES[shape](sharing, vocab, 1))))


class KernelBench:
    """A policy in this process, built once for each of the ways."""

    def __init__(self, model: Path, rendezvous: str, tokens: int) -> None:
        apply_environment()
        from megarl.config.schema import ActorConfig, ModelConfig, OptimizerConfig
        from megarl.parallel.worker import RankWorker

        self.worker = RankWorker(0)
        self.worker.prepare()
        actor = ActorConfig(optimizer=OptimizerConfig(distributed=False), micro_batch_tokens=tokens)
        self.worker.join(actor.layout, f"file://{rendezvous}", 60.0)
        dtype: Literal["float32", "bfloat16"] = "bfloat16" if platform().name == "cuda" else "float32"
        self.role = RoleSpec(role=Role.ACTOR, model=ModelConfig(path=str(model), dtype=dtype), settings=actor)

    def load(self, way: KernelWay) -> None:
        from megarl.parallel.backend import BACKENDS, cuda_backend

        if platform().name == "cuda":
            BACKENDS["cuda"] = cuda_backend(transformer_engine=way.transformer_engine)
        settings = replace(self.role.settings, share_prefixes=True, prefix_attention=way.attention)
        self.role = replace(self.role, settings=settings)
        self.worker.load(LoadRequest(roles=(self.role,), seed=0))

    def update_ms(self, rows: Sequence[Row], *, shares: bool, repeats: int) -> float:
        """Return the median time of an optimizer step, after one that compiles and warms up."""
        from megarl.algos.build import build_algorithm
        from megarl.config.algo import AlgoConfig
        from megarl.train.passes import RoleUpdater

        loaded = self.worker.roles[Role.ACTOR]
        (chunk,) = loaded.chunks
        chunk.shares_prefixes = shares
        role: Any = replace(self.role, settings=replace(self.role.settings, share_prefixes=shares))
        objective = build_algorithm(AlgoConfig(), max_response_tokens=max(row.num_response_tokens for row in rows))
        rank: Any = OneRank(self.worker)
        updater = RoleUpdater(rank, role, objective, total_steps=1000, dims=loaded.model_spec.dims)
        times = []
        for _ in range(repeats + 1):
            platform().synchronize()
            begun = time.perf_counter()
            updater.update(rows, objective.initial_state(), step=0, with_outputs=False)
            platform().synchronize()
            times.append(1000 * (time.perf_counter() - begun))
        return statistics.median(times[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--model", type=Path, help="a model directory; none: two layers of Qwen3-8B's sizes")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--sharing", nargs="+", type=int, default=[2, 4, 8])
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path, help="also write the results there, after each tree")
    options = parser.parse_args()
    if platform().name != options.device:
        parser.error(f"this is {platform().name}, expected {options.device}; give --device {platform().name}")
    installed = find_spec("transformer_engine") is not None and options.device == "cuda"
    ways = [each for each in options.ways if installed or not WAYS[each].transformer_engine]
    if options.device == "cpu":
        ways = ["torch"]
    results: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as directory:
        path = options.model or Path(directory) / "model"
        if options.model is None:
            make_model(path, tiny=options.device == "cpu")
        bench = KernelBench(path, f"{directory}/rendezvous", options.tokens)
        for way in ways:
            bench.load(WAYS[way])
            for shape in options.shapes:
                for sharing in options.sharing:
                    measure(bench, way, shape, sharing, options, results.setdefault(f"{shape} {sharing}", {}))
                    if options.json:
                        options.json.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    columns = list(dict.fromkeys(name for each in results.values() for name in each))
    lines = [
        [name, *(f"{each[column]:.3f}" if column in each else "" for column in columns)]
        for name, each in results.items()
    ]
    print("\n".join(align([["tree", *columns], *lines])))


def measure(
    bench: KernelBench, way: str, shape: str, sharing: int, options: argparse.Namespace, into: dict[str, float]
) -> None:
    """Add the times of a tree under a way; flattened rows are the same to both kernels of some layers."""
    from megarl.record.performance import update_flops

    dims = bench.worker.roles[Role.ACTOR].model_spec.dims
    rows = tree(shape, sharing, dims.vocab, options.tokens)
    flat = f"flat {'te' if WAYS[way].transformer_engine else 'torch'}"
    if flat not in into:
        into["different"] = sum(row.num_tokens - row.num_uncounted for row in counted_once(rows))
        into["on paths"] = sum(row.num_tokens for row in rows)
        into["FLOPs"] = update_flops(dims, rows, shares_prefixes=True) / update_flops(dims, rows)
        into[flat] = bench.update_ms(rows, shares=False, repeats=options.repeats)
    into[way] = bench.update_ms(rows, shares=True, repeats=options.repeats) / into[flat]


def make_model(path: Path, *, tiny: bool) -> None:
    from megarl_lab.recipes.tiny_model import TinyModelConfig, make_tiny_model

    config = TinyModelConfig(
        hidden_size=4096,
        num_layers=2,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        ffn_size=12288,
        max_positions=32768,
        dtype="bfloat16",
    )
    make_tiny_model(path, TinyModelConfig(max_positions=32768) if tiny else config, seed=0)


if __name__ == "__main__":
    main()
