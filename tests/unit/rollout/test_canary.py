"""What the canary asks engines."""

import numpy as np

from megarl.rollout.canary import NUM_TOKENS, canary_requests
from megarl.types import Prompt
from megarl.types.images import RowImage


def prompt(*ids: int, images: tuple[RowImage, ...] = ()) -> Prompt:
    return Prompt(uid=str(ids), token_ids=ids, data_source="d", ground_truth="", images=images)


def test_texts_follow_each_other_until_two_blocks_and_a_token_are_full() -> None:
    prompts = [prompt(1, 2, 3), prompt(4, 5), prompt(6, 7, 8, 9, 10, 11, 12, 13, 14, 15)]
    found = canary_requests(prompts, block=4, room=100, temperature=1.0)
    assert [each.token_ids for each in found] == [
        (1, 2, 3, 4, 5, 6, 7, 8, 9),
        (4, 5, 6, 7, 8, 9, 10, 11, 12),
        (6, 7, 8, 9, 10, 11, 12, 13, 14),
    ]
    assert {each.max_tokens for each in found} == {NUM_TOKENS}
    # A single short prompt follows itself.
    assert canary_requests([prompt(1, 2)], block=2, room=100, temperature=1.0)[0].token_ids == (1, 2, 1, 2, 1)


def test_no_more_than_four_prompts_are_asked() -> None:
    assert len(canary_requests([prompt(i) for i in range(1, 9)], block=4, room=100, temperature=1.0)) == 4


def test_what_follows_has_room() -> None:
    """20 tokens in all: four of the prompt, and then 16."""
    (found,) = canary_requests([prompt(1, 2, 3)], block=32, room=20, temperature=1.0)
    assert (found.token_ids, found.max_tokens) == ((1, 2, 3, 1), 16)
    (found,) = canary_requests([prompt(1, 2, 3)], block=32, room=2, temperature=1.0)
    assert (found.token_ids, found.max_tokens) == ((1,), 1)


def test_prompts_with_images_stay_as_they_are_and_lend_no_tokens() -> None:
    image = RowImage(digest="d", grid=(1, 2, 2), places=np.array([1]))
    found = canary_requests([prompt(1, 9, 2, images=(image,)), prompt(3)], block=2, room=100, temperature=1.0)
    assert [each.token_ids for each in found] == [(1, 9, 2), (3, 3, 3, 3, 3)]
    assert found[0].images == (image,)


def test_without_tokens_there_is_nothing_to_ask() -> None:
    assert canary_requests([prompt()], block=2, room=100, temperature=1.0) == []


def test_each_request_has_cached_keys_of_its_own() -> None:
    first, second = canary_requests([prompt(1), prompt(2)], block=1, room=100, temperature=0.7)
    assert first.cache_salt
    assert first.cache_salt != second.cache_salt
    assert (first.sampling.temperature, first.sampling.top_p, first.sampling.top_k) == (0.7, 1.0, -1)
