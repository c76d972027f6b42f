"""Measure how evenly rows of long-tailed lengths load data-parallel ranks: with equal row counts, and as megarl plans.

python -m megarl_lab.bench.balance
python -m megarl_lab.bench.balance --config configs/model/hf/qwen3-8b --median 1500 --json balance.json

Ranks wait for the one with the most work, so the largest over the mean is the factor that imbalance costs. FLOPs are
those of a forward pass. Lengths are log-normal, cut at --max-tokens. The bound is the longest row's FLOPs over the mean
of a rank, below which no plan can come.
"""

import argparse
import json
import random
from dataclasses import asdict, dataclass
from pathlib import Path

from megarl.data.packing import Bins, balance
from megarl.record.performance import forward_flops
from megarl.record.text_table import align
from megarl.weights.dims import Dims
from megarl.weights.families import read_model_spec


@dataclass(frozen=True, slots=True, kw_only=True)
class BalanceResult:
    """The largest rank's tokens and FLOPs over the mean, with equal row counts and as planned."""

    rows: int
    ranks: int
    equal_tokens: float
    equal_flops: float
    planned_tokens: float
    planned_flops: float
    bound_flops: float


def equal_rows(lengths: list[int], ranks: int) -> Bins:
    """Deal rows out by length, forwards and backwards in turn, so that every rank has as many."""
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    bins: Bins = [[] for _ in range(ranks)]
    for place, index in enumerate(order):
        lap, position = divmod(place, ranks)
        bins[position if lap % 2 == 0 else ranks - 1 - position].append(index)
    return bins


def measure(lengths: list[int], ranks: int, dims: Dims) -> BalanceResult:
    costs = [forward_flops(dims, num_tokens=n, num_head_tokens=n) for n in lengths]

    def imbalance(bins: Bins, values: list[int]) -> float:
        sums = [sum(values[i] for i in members) for members in bins]
        return max(sums) * len(sums) / sum(sums)

    equal, planned = equal_rows(lengths, ranks), balance(costs, ranks)
    return BalanceResult(
        rows=len(lengths),
        ranks=ranks,
        equal_tokens=imbalance(equal, lengths),
        equal_flops=imbalance(equal, costs),
        planned_tokens=imbalance(planned, lengths),
        planned_flops=imbalance(planned, costs),
        bound_flops=max(costs) * ranks / sum(costs),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, default=Path("configs/model/hf/qwen3-8b"), help="a model directory")
    parser.add_argument("--median", type=float, default=2000.0, help="median length in tokens")
    parser.add_argument("--sigma", type=float, default=0.9, help="standard deviation of the logarithm of lengths")
    parser.add_argument("--max-tokens", type=int, default=16384)
    parser.add_argument("--json", type=Path, help="also write the results there")
    options = parser.parse_args()
    dims, rng, results = read_model_spec(str(options.config)).dims, random.Random(0), []
    for rows, ranks in ((256, 8), (256, 32), (512, 16), (1024, 8), (1024, 64)):
        drawn = (round(options.median * rng.lognormvariate(0.0, options.sigma)) for _ in range(rows))
        results.append(measure([min(max(n, 1), options.max_tokens) for n in drawn], ranks, dims))
    header = ("rows", "ranks", "tokens, equal rows", "FLOPs, equal rows", "tokens", "FLOPs", "FLOPs, bound")
    table = [(str(r.rows), str(r.ranks), *(f"{value:.3f}" for value in list(asdict(r).values())[2:])) for r in results]
    print("\n".join(align([header, *table], left=())))
    if options.json:
        options.json.write_text(json.dumps([asdict(result) for result in results], indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
