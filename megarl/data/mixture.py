"""Batches that mix several prompt files by weight.

With weights w_i, and p_i = w_i / Σ w, file i's share of the first n draws is kept next to n·p_i: each draw goes to the
file that lags furthest behind its share (smooth weighted round-robin). Shares are thus exact over any stretch of
batches, not only on average; within a file, rows come in the seeded order of `PromptSampler`.
"""

import itertools
from collections.abc import Mapping, Sequence
from typing import Protocol

from megarl.config.schema import WeightedFile
from megarl.data.sampler import PromptSampler
from megarl.errors import ConfigError, DataError


class Sampler(Protocol):
    """Endless batches of row indices, without a row twice in a batch; its state is exact and plain numbers."""

    def next_batch(self) -> list[int]: ...

    def state_dict(self) -> Mapping[str, float]: ...

    def load_state_dict(self, state: Mapping[str, float]) -> None: ...


def train_files(entries: Sequence[str | WeightedFile]) -> tuple[str, ...]:
    """The paths of `data.train`."""
    return tuple(entry if isinstance(entry, str) else entry.path for entry in entries)


def prompt_sampler(
    entries: Sequence[str | WeightedFile], sizes: Sequence[int], *, batch_size: int, seed: int, shuffle: bool
) -> Sampler:
    """The sampler that `data.train` asks for: over all rows alike, or a mixture if an entry has a weight.

    Args:
        sizes: usable rows of each file, in the order of the entries.
    """
    if all(isinstance(entry, str) for entry in entries):
        return PromptSampler(sum(sizes), batch_size, seed, shuffle)
    weights = [entry.weight if isinstance(entry, WeightedFile) else 1.0 for entry in entries]
    return MixtureSampler(sizes, weights, batch_size=batch_size, seed=seed, shuffle=shuffle)


class MixtureSampler:
    """Batches of rows of several data sets laid end to end, with each one's share of every batch given by its weight.

    Raises:
        ConfigError: a data set has fewer rows than its share of a batch, so that rows would repeat within one.
    """

    def __init__(
        self, sizes: Sequence[int], weights: Sequence[float], *, batch_size: int, seed: int, shuffle: bool = True
    ) -> None:
        total = sum(weights)
        self._shares = [weight / total for weight in weights]
        for i, (size, share) in enumerate(zip(sizes, self._shares, strict=True)):
            # Credits stay between -1 and the number of sets less one, so a batch exceeds its share by less than that
            # number.
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
        self._samplers: list[PromptSampler]
        self._credits: list[float]
        self._num_batches: int
        self._restart()

    def next_batch(self) -> list[int]:
        """The next `batch_size` row indices, data set by data set."""
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
        """Plain numbers: how many batches were drawn, and the settings that decide which."""
        return {**self._settings, "num_batches": self._num_batches}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Continue after `num_batches`, by replaying the draws; DataError if the settings differ."""
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

    def _restart(self) -> None:
        self._samplers = [PromptSampler(size, 1, self._seed, self._shuffle) for size in self._sizes]
        self._credits = [0.0] * len(self._sizes)
        self._num_batches = 0
