"""How requests are dealt to engines."""

from collections.abc import Sequence

import pytest

from megarl.cluster.engines import deal_requests
from megarl.rollout.engine import GenerationRequest


def requests(prompts: Sequence[int]) -> list[GenerationRequest]:
    return [
        GenerationRequest(token_ids=(prompt,), seed=i, temperature=1.0, top_p=1.0, top_k=-1, max_tokens=4)
        for i, prompt in enumerate(prompts)
    ]


@pytest.mark.parametrize(
    ("prompts", "num_engines", "hands"),
    [
        ([7, 7, 8, 8], 1, [[0, 1, 2, 3]]),
        # A prompt's samples stay together, whatever lies between them.
        ([7, 7, 8, 8, 9, 9], 2, [[0, 1, 4, 5], [2, 3]]),
        ([7, 8, 7, 9, 8, 7], 3, [[0, 2, 5], [1, 4], [3]]),
        # Too few prompts: no engine stays idle.
        ([7, 7, 7], 2, [[0, 2], [1]]),
        ([7], 3, [[0], [], []]),
        ([], 2, [[], []]),
    ],
)
def test_deal(prompts: Sequence[int], num_engines: int, hands: list[list[int]]) -> None:
    assert deal_requests(requests(prompts), num_engines) == hands
