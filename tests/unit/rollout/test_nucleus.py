"""The tokens that truncated sampling left, out of the log-probs that vLLM returns."""

import numpy as np

from megarl.rollout.nucleus import head_of, nucleus_of


def test_by_hand() -> None:
    """Three positions of a vocabulary of which vLLM returns the sampled token and the three likeliest."""
    ids = np.array([[4, 9, 4, 2], [6, 6, 1, 3], [8, 5, 8, 7]])
    kept = np.array([[0.25, 0.75, 0.25, 0.0], [1.0, 1.0, 0.0, 0.0], [0.3, 0.5, 0.3, 0.2]])
    with np.errstate(divide="ignore"):
        nucleus, logprobs, head = nucleus_of(ids, np.log(kept).astype(np.float32))
    assert nucleus.tolist() == [[9, 4, -1], [6, -1, -1], [5, 8, 7]]
    assert nucleus.dtype == np.int32
    np.testing.assert_allclose(logprobs, np.log([0.25, 1.0, 0.3]), atol=1e-6)
    assert head.ids.tolist() == nucleus.tolist()
    np.testing.assert_allclose(np.exp(head.logprobs), [[0.75, 0.25, 0], [1, 0, 0], [0.5, 0.3, 0.2]], atol=1e-6)


def test_columns_that_no_position_needs_are_left_out() -> None:
    ids, logprobs = np.array([[6, 6, 1, 3]]), np.array([[0.0, 0.0, -np.inf, -np.inf]], dtype=np.float32)
    assert nucleus_of(ids, logprobs)[0].tolist() == [[6]]
    assert nucleus_of(ids[:0], logprobs[:0])[0].shape == (0, 1)


def test_a_tie_at_the_last_place() -> None:
    """Token 8 ties with the third of three returned ones: p = 0.4, 0.2, 0.2 and 0.2, of which 0.8 are returned."""
    ids = np.array([[8, 5, 1, 7], [5, 5, 1, 7]])
    probs = np.array([[0.2, 0.4, 0.2, 0.2], [0.4, 0.4, 0.2, 0.2]], dtype=np.float32)
    nucleus, logprobs, head = nucleus_of(ids, np.log(probs))
    assert nucleus.tolist() == [[5, 1, 8], [5, 1, 7]]
    np.testing.assert_allclose(np.exp(logprobs), [0.2 / 0.8, 0.4 / 0.8], atol=1e-6)
    np.testing.assert_allclose(np.exp(head.logprobs), [[0.5, 0.25, 0.25]] * 2, atol=1e-6)


def test_a_head_has_the_sampled_token_once() -> None:
    """The second token is not among the two likeliest; logits of a vocabulary of two leave no third."""
    head = head_of(np.array([[4, 9, 4], [2, 9, 4]]), np.log(np.array([[0.25, 0.5, 0.25], [0.125, 0.5, 0.25]])))
    assert head.ids.tolist() == [[9, 4, -1], [9, 4, 2]]
    np.testing.assert_allclose(np.exp(head.logprobs), [[0.5, 0.25, 0], [0.5, 0.25, 0.125]])
