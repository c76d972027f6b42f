"""Draw batches of rows in an order that depends only on the seed, so that a resumed run draws the same batches.

Several prompt files can be mixed by weight. With weights w_i and p_i = w_i / Σ w, about n·p_i of the first n draws go
to file i, because each draw goes to the file that is furthest behind its share (smooth weighted round-robin). The
shares thus hold in every stretch of batches, not only on average. Within a file, `PromptSampler` decides the order of
rows.
"""

import itertools
from collections.abc import Mapping, Sequence
from typing import TypeAlias

import numpy as np

from megarl.config.schema import WeightedFile
from megarl.errors import ConfigError, DataError
from megarl.types import IntArray


def require_batch(dataset_size: int, batch_size: int, key: str = "trainer.prompts_per_step") -> None:
    """Raise ConfigError unless a data set has enough rows for one batch, whose size `key` sets."""
    if not 1 <= batch_size <= dataset_size:
        raise ConfigError(
            f"{key}: got {batch_size}, expected 1 to {dataset_size}, the number of rows to train on; lower it, or add "
            "data"
        )


class PromptSampler:
    """An endless source of batches of row indices; each epoch is a fresh permutation drawn from (seed, epoch).

    A batch may contain the end of one epoch and the start of the next, but no row twice, because a prompt's samples are
    recognised by the prompt's uid. Rows that would repeat are drawn later in the new epoch.

    `epoch` is the epoch of the last row drawn, counted from 0; -1 before the first batch.
    """

    def __init__(self, dataset_size: int, batch_size: int, seed: int, shuffle: bool = True) -> None:
        require_batch(dataset_size, batch_size)
        self._settings = {
            "dataset_size": dataset_size,
            "batch_size": batch_size,
            "seed": seed,
            "shuffle": int(shuffle),
        }
        self._dataset_size = dataset_size
        self._batch_size = batch_size
        self._seed = seed
        self._shuffle = shuffle
        self._restart()

    def _restart(self) -> None:
        self.epoch = -1
        self._order: IntArray = np.empty(0, dtype=np.int64)
        self._position = 0
        self._num_batches = 0

    def next_batch(self) -> list[int]:
        """Draw the next `batch_size` row indices."""
        batch = self.draw(self._batch_size)
        self._num_batches += 1
        return batch

    def draw(self, num_rows: int) -> list[int]:
        """Draw the next `num_rows` row indices, at most the data set's size; `MixtureSampler` uses this."""
        rows = self._order[self._position : self._position + num_rows]
        self._position += len(rows)
        if len(rows) < num_rows:
            num_missing = num_rows - len(rows)
            self.epoch += 1
            order = np.arange(self._dataset_size, dtype=np.int64)
            if self._shuffle:
                order = np.random.default_rng((self._seed, self.epoch)).permutation(order)
            if len(rows):
                first = order[~np.isin(order, rows)][:num_missing]
                order = np.concatenate([first, order[~np.isin(order, first)]])
            self._order = order
            rows = np.concatenate([rows, self._order[:num_missing]])
            self._position = num_missing
        return [int(index) for index in rows]

    def state_dict(self) -> dict[str, int]:
        """Return the number of batches drawn so far, and the settings on which the order of rows depends."""
        return {**self._settings, "num_batches": self._num_batches}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Restore the state by drawing `num_batches` batches again; raise DataError if the settings differ."""
        for name, value in self._settings.items():
            if state[name] != value:
                raise DataError(
                    f"sampler state: {name} was {state[name]} and is now {value}; "
                    f"resume with the same data and batch size, or start a new run"
                )
        self._restart()
        for _ in range(int(state["num_batches"])):
            self.next_batch()


class MixtureSampler:
    """An endless source of batches of row indices from several data sets, which share each batch in proportion to
    weights.

    Raises:
        ConfigError: a data set has fewer rows than its share of a batch, so that rows would repeat within one.
    """

    def __init__(
        self, sizes: Sequence[int], weights: Sequence[float], *, batch_size: int, seed: int, shuffle: bool = True
    ) -> None:
        total = sum(weights)
        self._shares = [weight / total for weight in weights]
        for i, (size, share) in enumerate(zip(sizes, self._shares, strict=True)):
            # Credits stay between -1 and the number of sets minus one, so a batch exceeds its share by less than the
            # number of sets.
            most = min(batch_size, int(batch_size * share) + len(sizes))
            if size < most:
                raise ConfigError(
                    f"data.train[{i}]: has {size} rows, but its weight gives it up to {most} of the {batch_size} "
                    f"prompts of a step; lower its weight or trainer.prompts_per_step, or add rows"
                )
        self._sizes, self._batch_size, self._seed, self._shuffle = list(sizes), batch_size, seed, shuffle
        self._starts = [0, *itertools.accumulate(sizes)]
        self._settings: dict[str, float] = {"batch_size": batch_size, "seed": seed, "shuffle": int(shuffle)}
        for i, (size, weight) in enumerate(zip(sizes, weights, strict=True)):
            self._settings |= {f"size_{i}": size, f"weight_{i}": weight}
        self._restart()

    def _restart(self) -> None:
        self._samplers = [PromptSampler(size, 1, self._seed, self._shuffle) for size in self._sizes]
        self._credits = [0.0] * len(self._sizes)
        self._num_batches = 0

    def next_batch(self) -> list[int]:
        """Draw the next `batch_size` row indices, grouped by data set."""
        counts = [0] * len(self._sizes)
        for _ in range(self._batch_size):
            self._credits = [credit + share for credit, share in zip(self._credits, self._shares, strict=True)]
            chosen = max(range(len(counts)), key=lambda i: self._credits[i])
            self._credits[chosen] -= 1.0
            counts[chosen] += 1
        self._num_batches += 1
        draws = (sampler.draw(count) for sampler, count in zip(self._samplers, counts, strict=True))
        return [start + index for start, rows in zip(self._starts, draws, strict=False) for index in rows]

    def state_dict(self) -> dict[str, float]:
        """Return the number of batches drawn so far, and the settings on which the order of rows depends."""
        return {**self._settings, "num_batches": self._num_batches}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Restore the state by drawing `num_batches` batches again; raise DataError if the settings differ."""
        for name in sorted(self._settings.keys() | (state.keys() - {"num_batches"})):
            was, now = state.get(name), self._settings.get(name)
            if was != now:
                raise DataError(
                    f"sampler state: {name} was {was} and is now {now}; "
                    f"resume with the same data.train and batch size, or start a new run"
                )
        self._restart()
        for _ in range(int(state["num_batches"])):
            self.next_batch()


# A sampler draws endless batches of row indices, none twice in a batch; its exact state consists of plain numbers.
Sampler: TypeAlias = PromptSampler | MixtureSampler


def prompt_sampler(
    entries: Sequence[str | WeightedFile], sizes: Sequence[int], *, batch_size: int, seed: int, shuffle: bool
) -> Sampler:
    """Build the sampler for `data.train`: it draws all rows alike, or if any file has a weight, files by their
    weights.

    Args:
        sizes: usable rows of each file, in the order of the entries.
    """
    if all(isinstance(entry, str) for entry in entries):
        return PromptSampler(sum(sizes), batch_size, seed, shuffle)
    weights = [entry.weight if isinstance(entry, WeightedFile) else 1.0 for entry in entries]
    return MixtureSampler(sizes, weights, batch_size=batch_size, seed=seed, shuffle=shuffle)


def train_files(entries: Sequence[str | WeightedFile]) -> tuple[str, ...]:
    """Return the paths of `data.train`."""
    return tuple(entry if isinstance(entry, str) else entry.path for entry in entries)
