"""How requests are dealt to engines."""

from collections.abc import Sequence

import pytest

from megarl.cluster.engines import Submission, deal_again, deal_requests
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


@pytest.mark.parametrize(
    ("finished", "exactly", "hands"),
    [
        # Engine 1 died with one request done: what it had left is dealt out to all.
        ({0, 1, 2, 3, 8, 9, 10, 11, 5}, False, [[4, 7], [6]]),
        # In the same batch as before, or its bits would be others.
        ({0, 1, 2, 3, 8, 9, 10, 11, 5}, True, [[], [4, 5, 6, 7]]),
        # Whole prompts are left: they stay together.
        ({0, 1, 4, 5}, False, [[2, 3, 8, 9, 10, 11], [6, 7]]),
        ({0, 1, 4, 5}, True, [[0, 1, 2, 3, 8, 9, 10, 11], [4, 5, 6, 7]]),
    ],
)
def test_deal_again(finished: set[int], exactly: bool, hands: list[list[int]]) -> None:
    prompts = [7, 7, 7, 7, 8, 8, 8, 8, 9, 9, 9, 9]
    submission = Submission(
        requests=tuple(requests(prompts)), hands=((0, 1, 2, 3, 8, 9, 10, 11), (4, 5, 6, 7)), calls=()
    )
    assert deal_again(submission, finished, exactly=exactly) == hands
