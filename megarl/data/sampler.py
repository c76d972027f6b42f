"""Which rows make up which batch: a function of the seed alone, so that a resumed run draws the same ones."""

from collections.abc import Mapping

import numpy as np

from megarl.errors import ConfigError, DataError
from megarl.types import IntArray


def require_batch(dataset_size: int, batch_size: int) -> None:
    """ConfigError unless a data set has at least a batch of rows."""
    if not 1 <= batch_size <= dataset_size:
        raise ConfigError(
            f"batch size: got {batch_size} rows, expected 1 to {dataset_size}, the size of the data set; "
            f"lower trainer.prompts_per_step or sft.batch_size, or add data"
        )


class PromptSampler:
    """Endless batches of row indices; each epoch is a fresh permutation drawn from (seed, epoch).

    Batches run across the end of an epoch. No batch holds a row twice, for samples are grouped by their
    prompt's uid: rows that an unfinished batch already holds come after it in the new epoch.
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
        self._order: IntArray
        self._epoch: int
        self._position: int
        self._num_batches: int
        self._restart()

    @property
    def epoch(self) -> int:
        """The epoch of the last row drawn, from 0; -1 before the first batch."""
        return self._epoch

    def next_batch(self) -> list[int]:
        """The next `batch_size` row indices."""
        batch = self.draw(self._batch_size)
        self._num_batches += 1
        return batch

    def draw(self, num_rows: int) -> list[int]:
        """The next `num_rows` row indices, at most the size of the data set; mixtures draw as their weights ask."""
        rows = self._order[self._position : self._position + num_rows]
        self._position += len(rows)
        if len(rows) < num_rows:
            num_missing = num_rows - len(rows)
            self._start_epoch(held=rows, num_missing=num_missing)
            rows = np.concatenate([rows, self._order[:num_missing]])
            self._position = num_missing
        return [int(index) for index in rows]

    def state_dict(self) -> dict[str, int]:
        """Plain integers: how many batches were drawn, and the settings that decide which."""
        return {**self._settings, "num_batches": self._num_batches}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Continue after `num_batches`, by replaying the draws; DataError if the settings differ."""
        for name, value in self._settings.items():
            if state[name] != value:
                raise DataError(
                    f"sampler state: {name} was {state[name]} and is now {value}; "
                    f"resume with the same data and batch size, or start a new run"
                )
        self._restart()
        for _ in range(int(state["num_batches"])):
            self.next_batch()

    def _restart(self) -> None:
        self._epoch = -1
        self._order = np.empty(0, dtype=np.int64)
        self._position = 0
        self._num_batches = 0

    def _start_epoch(self, *, held: IntArray, num_missing: int) -> None:
        self._epoch += 1
        order = np.arange(self._dataset_size, dtype=np.int64)
        if self._shuffle:
            order = np.random.default_rng((self._seed, self._epoch)).permutation(order)
        if len(held):
            first = order[~np.isin(order, held)][:num_missing]
            order = np.concatenate([first, order[~np.isin(order, first)]])
        self._order = order
