"""Rows of random tokens."""

from collections.abc import Sequence

import numpy as np

from megarl.types import Row
from tests.helpers.checkpoints import VOCAB_SIZE


def random_rows(lengths: Sequence[tuple[int, int]], *, seed: int = 0, holes: bool = True) -> list[Row]:
    """Rows of (prompt, response) tokens. With `holes` the loss mask leaves out every third response token."""
    rng = np.random.default_rng(seed)
    return [
        Row(
            uid=f"p{i}",
            sample_index=0,
            token_ids=rng.integers(0, VOCAB_SIZE, num_prompt + num_response),
            num_prompt_tokens=num_prompt,
            loss_mask=np.arange(num_response) % 3 != 2 if holes else np.ones(num_response, dtype=np.bool_),
        )
        for i, (num_prompt, num_response) in enumerate(lengths)
    ]
