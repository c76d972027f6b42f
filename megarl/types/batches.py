"""Define the tensors that algorithms read and return: rows padded to [B, T], model outputs for them, and advantages."""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from megarl.config.torch_later import Tensor, torch
from megarl.types.rows import Row
from megarl.types.samples import Reward


@dataclass(frozen=True, slots=True, eq=False)
class RowQuantities(Mapping[str, Tensor]):
    """The quantities of rows by name, padded to [B, T] when they are first read: few algorithms read all of them.

    Raises ValueError unless all rows have quantities of the same names.
    """

    rows: Sequence[Row]
    _padded: dict[str, Tensor] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        names = self.rows[0].quantities.keys() if self.rows else frozenset()
        for row in self.rows:
            if row.quantities.keys() != names:
                differing = sorted(row.quantities.keys() ^ names)
                raise ValueError(
                    f"row {row.label}: {differing} are quantities of some rows only; compute them for all rows of a "
                    "batch"
                )

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._padded:
            arrays = [row.quantities[name] for row in self.rows]
            if not arrays:
                raise KeyError(name)
            self._padded[name] = pad_rows(arrays, dtype=torch.float32)
        return self._padded[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.rows[0].quantities if self.rows else ())

    def __len__(self) -> int:
        return len(self.rows[0].quantities) if self.rows else 0


class _PaddedQuantities:
    """The base class of batches that hold per-token quantities [B, T], such as log-probs, by name.

    `quantity` returns one of them; if it was not computed, the KeyError says how to have it computed.
    """

    __slots__ = ()
    loss_mask: Tensor
    quantities: Mapping[str, Tensor]

    def quantity(self, name: str) -> Tensor:
        if name in self.quantities:
            return self.quantities[name]
        if not len(self.loss_mask):  # A batch without rows has every quantity, all empty.
            return torch.zeros(self.loss_mask.shape, device=self.loss_mask.device)
        raise KeyError(
            f"{name} was not computed for this batch (there are: {sorted(self.quantities)}); "
            f"add it to the algorithm's requires()"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredBatch(_PaddedQuantities):
    """All rows of a step with their rewards, as advantage estimators read them: complete groups, padded to [B, T].

    uids: B group keys. rewards: [B], one per row. correct: [B] bool. loss_mask: [B, T] bool. truncated: [B] bool, rows
    cut at the length limit (None: no row). seed: determines this step's random choices. details: [B] each, the scorers'
    other numbers by name, NaN where a row lacks it. no_opinion: by name, [B] bool, the rows that rightly
    have none, since no scorer has an opinion on them.
    """

    uids: tuple[str, ...]
    rewards: Tensor
    correct: Tensor
    loss_mask: Tensor
    quantities: Mapping[str, Tensor]
    truncated: Tensor | None = None
    step: int = 0
    seed: int = 0
    details: Mapping[str, Tensor] = field(default_factory=dict)
    no_opinion: Mapping[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        b = len(self.uids)
        if self.rewards.shape != (b,) or self.correct.shape != (b,) or self.loss_mask.shape[0] != b:
            raise ValueError(
                f"scored batch: {b} uids, rewards {tuple(self.rewards.shape)}, correct "
                f"{tuple(self.correct.shape)}, loss_mask {tuple(self.loss_mask.shape)} do not agree"
            )
        _check_shapes(self.quantities, self.loss_mask)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowBatch(_PaddedQuantities):
    """One micro-batch as loss functions read it: complete rows padded to [B, T], under every parallel layout."""

    labels: tuple[str, ...]
    loss_mask: Tensor
    quantities: Mapping[str, Tensor]

    def __post_init__(self) -> None:
        _check_shapes(self.quantities, self.loss_mask)


def _check_shapes(quantities: Mapping[str, Tensor], loss_mask: Tensor) -> None:
    if isinstance(quantities, RowQuantities):
        return  # rows have checked theirs
    for name, value in quantities.items():
        if value.shape != loss_mask.shape:
            raise ValueError(f"{name}: got shape {tuple(value.shape)}, expected {tuple(loss_mask.shape)}")


def scored_batch(
    rows: Sequence[Row],
    rewards: Sequence[Reward],
    *,
    truncated: Sequence[bool] | None = None,
    step: int = 0,
    seed: int = 0,
) -> ScoredBatch:
    """Put the rows of a step and their rewards together for the advantage estimator; quantities are float32 on the
    host, each padded when it is first read.

    >>> verdicts = [Reward(score=1.0, correct=True, details={"format": 0.25})]
    >>> batch = scored_batch([row([1, 0], values=[0.5, 0.0])], verdicts)
    >>> batch.quantities["values"].tolist(), batch.details["format"].tolist()
    ([[0.5, 0.0]], [0.25])
    """
    silent = sorted({name for reward in rewards for name in reward.no_opinion})
    names = sorted({*silent, *(name for reward in rewards for name in reward.details)})
    return ScoredBatch(
        uids=tuple(r.uid for r in rows),
        rewards=torch.tensor([r.score for r in rewards], dtype=torch.float32),
        correct=torch.tensor([r.correct for r in rewards], dtype=torch.bool),
        loss_mask=pad_rows([r.loss_mask for r in rows], dtype=torch.bool),
        quantities=RowQuantities(rows),
        truncated=None if truncated is None else torch.tensor(truncated, dtype=torch.bool),
        step=step,
        seed=seed,
        details={name: torch.tensor([r.details.get(name, math.nan) for r in rewards]) for name in names},
        no_opinion={name: torch.tensor([name in r.no_opinion for r in rewards]) for name in silent},
    )


def row_batch(rows: Sequence[Row], *, device: "torch.device") -> RowBatch:
    """Pad the rows of a micro-batch to [B, T] for the loss, on the given device.

    >>> row_batch([row([1, 0]), row([1])], device=torch.device("cpu")).loss_mask.tolist()
    [[True, False], [True, False]]
    """
    loss_mask = pad_rows([r.loss_mask for r in rows], dtype=torch.bool).to(device)
    quantities = {name: values.to(device) for name, values in RowQuantities(rows).items()}
    # A loss looks quantities up by name, whether or not its rank has rows.
    nothing = torch.zeros(loss_mask.shape, device=device)
    return RowBatch(
        labels=tuple(r.label for r in rows),
        loss_mask=loss_mask,
        quantities=quantities if rows else defaultdict(lambda: nothing),
    )


# About how many tokens are looked at together, so that they stay in the processor's caches.
BLOCK_TOKENS = 1 << 16


def length_blocks(lengths: Sequence[int], num_tokens: int = BLOCK_TOKENS) -> list[list[int]]:
    """Split rows, by index, into blocks of similar lengths: of one row, or at most `num_tokens` tokens when padded.

    >>> length_blocks([3, 1, 3, 1], num_tokens=4)
    [[1, 3], [0], [2]]
    """
    blocks: list[list[int]] = []
    for i in sorted(range(len(lengths)), key=lengths.__getitem__):
        if not blocks or (len(blocks[-1]) + 1) * lengths[i] > num_tokens:
            blocks.append([])
        blocks[-1].append(i)
    return blocks


def pad_rows(arrays: Sequence[npt.NDArray[np.generic]], *, dtype: "torch.dtype") -> Tensor:
    """Stack arrays of shapes [R_i] into a right-padded [B, max R_i] tensor, 0 on the padding.

    >>> pad_rows([np.array([1, 2]), np.array([3])], dtype=torch.long).tolist()
    [[1, 2], [3, 0]]
    """
    width = max((len(a) for a in arrays), default=0)
    # A tensor's row takes several times as long to fill as an array's.
    padded = np.zeros((len(arrays), width), dtype=np.result_type(*arrays) if arrays else np.float32)
    for i, array in enumerate(arrays):
        padded[i, : len(array)] = array
    return torch.from_numpy(padded).to(dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyOutputs:
    """The current policy's outputs for a `RowBatch`: log-probs of the labels and entropies in nats, [B, T] each.

    All are 0 outside the loss mask. `entropy` carries a gradient only if the algorithm asked for it. divergence: from
    the teacher over the vocabulary, or what the loss computes beside the engine's head, with gradients; comparison:
    further values beside the two by name, without.
    """

    logprobs: Tensor
    entropy: Tensor | None
    divergence: Tensor | None = None
    comparison: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueOutputs:
    """The float32 values [B, T] of a scalar head (critic or reward model) for a `RowBatch`, 0 outside the loss mask."""

    values: Tensor


ModelOutputs: TypeAlias = PolicyOutputs | ValueOutputs


@dataclass(frozen=True, slots=True, kw_only=True)
class Advantages:
    """The advantages [B, T] of a batch, 0 outside the loss mask, with metrics to log.

    quantities: further tensors [B, T] that the updates need, by name, such as `returns` and `correction`.
    """

    values: Tensor
    quantities: Mapping[str, Tensor] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
