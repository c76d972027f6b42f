"""Find the images of a pack: which features of each stand at which tokens, and which tokens show the same image.

Sequences are the tokens of each row as indices into the pack, shared ones too.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from megarl.types import Row
from megarl.types.images import RowImage


@dataclass(frozen=True, slots=True, kw_only=True)
class PackImage:
    """An image of a pack. features: the numbers of its features that stand at `tokens`, among this rank's T.

    whose: the row that it was found in. num_features, grid: how many features the row has places for, in which form.
    """

    digest: str
    whose: str
    num_features: int
    grid: tuple[int, int] | None
    features: torch.Tensor
    tokens: torch.Tensor


def image_numbers(
    rows: Sequence[Row], sequences: Sequence[npt.NDArray[np.int64]], num_tokens: int
) -> npt.NDArray[np.int64]:
    """Return of each token of a pack the number of the image that it shows, from 1 on; 0: it shows none."""
    numbers = np.zeros(num_tokens, np.int64)
    for row, sequence in zip(rows, sequences, strict=False):
        for image in row.images:
            # Rows that share an image agree about its first token.
            numbers[sequence[image.places]] = sequence[image.places[0]] + 1
    return numbers


def images_of_pack(
    rows: Sequence[Row],
    sequences: Sequence[npt.NDArray[np.int64]],
    offsets: Sequence[int],
    place: npt.NDArray[np.int64],
    device: torch.device,
) -> tuple[PackImage, ...]:
    """Return the images of a pack, each once however often rows show it, without those of other ranks' tokens.

    offsets: where the rows' own parts begin. place: where each token lies on this rank; -1: another has it.
    """
    found: dict[str, tuple[str, RowImage, list[npt.NDArray[np.int64]]]] = {}
    for row, sequence, start in zip(rows, sequences, offsets, strict=False):
        for image in row.images:
            # Shared ones are those of the row that holds them.
            if (at := sequence[image.places])[0] >= start:
                found.setdefault(image.digest, (row.label, image, []))[-1].append(place[at])
    images = []
    for digest, (label, image, everywhere) in found.items():
        numbers = [np.flatnonzero(at >= 0) for at in everywhere]
        features = np.concatenate(numbers)
        tokens = np.concatenate([at[own] for at, own in zip(everywhere, numbers, strict=True)])
        if len(tokens):
            made = (torch.from_numpy(each).to(device) for each in (features, tokens))
            images.append(
                PackImage(
                    digest=digest,
                    whose=f"row {label}",
                    num_features=len(image.places),
                    grid=image.grid,
                    features=next(made),
                    tokens=next(made),
                )
            )
    return tuple(images)
