"""How requests are dealt to engines."""

from collections.abc import Sequence

import pytest

from megarl.cluster.engines import deal_requests
from megarl.config.generation import Sampling
from megarl.rollout.engine import GenerationRequest


def requests(prompts: Sequence[int]) -> list[GenerationRequest]:
    return [
        GenerationRequest(token_ids=(prompt,), seed=i, sampling=Sampling(temperature=1.0), max_tokens=4)
        for i, prompt in enumerate(prompts)
    ]


@pytest.mark.parametrize(
    ("prompts", "order", "engines"),
    [
        ([7, 7, 8, 8], [0], [0, 0, 0, 0]),
        # A prompt's samples stay together, whatever lies between them.
        ([7, 7, 8, 8, 9, 9], [0, 1], [0, 0, 1, 1, 0, 0]),
        ([7, 8, 7, 9, 8, 7], [0, 1, 2], [0, 1, 0, 2, 1, 0]),
        # Too few prompts: no engine stays idle.
        ([7, 7, 7], [0, 1], [0, 1, 0]),
        ([7], [0, 1, 2], [0]),
        ([], [0, 1], []),
        # Engine 1 has less to do than engine 2, and engine 0 is dead.
        ([7, 8, 9], [1, 2], [1, 2, 1]),
    ],
)
def test_deal(prompts: Sequence[int], order: list[int], engines: list[int]) -> None:
    assert deal_requests(requests(prompts), order) == engines
