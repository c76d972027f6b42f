"""Choose which engine worker shares memory with which trainer rank, so that as few bytes as possible are sent."""

import itertools
from collections.abc import Mapping

import numpy as np

from megarl.sync.plan.assign import Holding, alike_tensors, replicas_of
from megarl.weights.boxes import intersection, num_elements
from megarl.weights.safetensors_map import TensorSpec


def overlaps(specs: Mapping[str, TensorSpec], held: Mapping[int, Holding], needed: Mapping[int, Holding]) -> np.ndarray:
    """Compute |D_i ∩ S_j|, the bytes that worker i needs and rank j holds: [workers, ranks] int64, in key order."""
    replicas, columns = replicas_of(needed), {source: j for j, source in enumerate(held)}
    # For each different holding of workers: bytes by rank. Additions to single elements of arrays would be slow.
    rows = [[0] * len(columns) for _ in replicas]
    alike_needs = dict(enumerate(holding for holding, _ in replicas))
    for alike in itertools.chain.from_iterable(group for _, group in alike_tensors(specs, held, alike_needs)):
        for (wanted, takers), (has, holders) in itertools.product(alike.needed.items(), alike.held.items()):
            if (common := intersection(wanted, has)) is not None:
                num_bytes = len(alike.tensors) * num_elements(common) * alike.spec.dtype.itemsize
                for taker, source in itertools.product(takers, holders):
                    rows[taker][columns[source]] += num_bytes
    by_receiver = {receiver: row for row, (_, receivers) in zip(rows, replicas, strict=True) for receiver in receivers}
    return np.array([by_receiver[receiver] for receiver in needed], dtype=np.int64).reshape(len(needed), len(columns))


def best_neighbours(shared: np.ndarray) -> list[int]:
    """Choose a different trainer rank σ(i) to put beside each engine worker i, so that Σ_i |D_i ∩ S_σ(i)| is largest.

    shared: |D_i ∩ S_j| [workers, ranks] from `overlaps`, or rows and columns of it, such as for one engine.

    Raises:
        ValueError: there are more workers than ranks.
    """
    if shared.shape[0] > shared.shape[1]:
        raise ValueError(
            f"got {shared.shape[0]} receivers and {shared.shape[1]} sources, expected at most as many receivers"
        )
    return assignment(-shared)


def assignment(costs: np.ndarray) -> list[int]:
    """Choose each row of [n, m] int64 its own column, n ≤ m, at least total cost (Hungarian method, O(n² m))."""
    num_rows, num_columns = costs.shape
    # Column 0 and row 0 are outside the matrix; paths begin there.
    row_price, column_price = np.zeros(num_rows + 1, dtype=np.int64), np.zeros(num_columns + 1, dtype=np.int64)
    row_of = np.zeros(num_columns + 1, dtype=np.int64)
    for row in range(1, num_rows + 1):
        row_of[0], column = row, 0
        least = np.full(num_columns + 1, np.iinfo(np.int64).max)
        before, seen = np.zeros(num_columns + 1, dtype=np.int64), np.zeros(num_columns + 1, dtype=bool)
        while row_of[column]:
            seen[column], at = True, row_of[column]
            reduced = costs[at - 1] - row_price[at] - column_price[1:]
            nearer = ~seen[1:] & (reduced < least[1:])
            least[1:][nearer], before[1:][nearer] = reduced[nearer], column
            open_columns = np.flatnonzero(~seen)
            column = open_columns[np.argmin(least[open_columns])]
            step = least[column]
            row_price[row_of[seen]] += step
            column_price[seen] -= step
            least[~seen] -= step
        while column:
            row_of[column] = row_of[before[column]]
            column = before[column]
    chosen = np.zeros(num_rows, dtype=np.int64)
    taken = np.flatnonzero(row_of[1:])
    chosen[row_of[1:][taken] - 1] = taken
    return [int(column) for column in chosen]
