"""Find, in the log-probs that vLLM returns, the tokens that top-k and top-p left to choose from, and the likeliest."""

import numpy as np

from megarl.types import FloatArray, IdArray, LikelyTokens, NucleusArray


def nucleus_of(ids: IdArray, logprobs: FloatArray) -> tuple[NucleusArray, FloatArray, LikelyTokens]:
    """Return the tokens that each token was sampled from (see `Segment`), its log-prob among them, and all of theirs.

    ids, logprobs: [n, 1 + k] of the sampled token, then of the k likeliest; the log-prob is −∞ for tokens that were
    left out. Where logits tie at the k-th place, vLLM samples from more than k tokens. Then the nucleus has k of them,
    always with the sampled one, and log-probs become those of the distribution over these k.
    """
    kept, values = ids[:, 1:].astype(np.int32), logprobs[:, 1:].copy()
    lacking = ~(kept == ids[:, :1]).any(1)
    kept[lacking, -1], values[lacking, -1] = ids[lacking, 0], logprobs[lacking, 0]
    finite = np.isfinite(values)
    width = max(finite.sum(1).max(initial=0), 1)
    mass = np.exp(values, where=finite, out=np.zeros_like(values)).sum(1)
    nucleus, log_mass = np.where(finite, kept, -1)[:, :width], np.log(mass)
    return (
        nucleus,
        logprobs[:, 0] - log_mass,
        LikelyTokens(ids=nucleus, logprobs=(values - log_mass[:, None])[:, :width]),
    )


def head_of(ids: IdArray, logprobs: FloatArray) -> LikelyTokens:
    """Return the k likeliest tokens, and last the sampled one where it is not among them (see `LikelyTokens`).

    ids, logprobs: as in `nucleus_of`, of tokens that were sampled from the whole vocabulary.

    >>> head = head_of(np.array([[7, 5, 7], [9, 5, 7]]), np.array([[-1, -0.5, -1], [-3, -0.5, -1]]))
    >>> head.ids.tolist(), head.logprobs.tolist()
    ([[5, 7, -1], [5, 7, 9]], [[-0.5, -1.0, -inf], [-0.5, -1.0, -3.0]])
    """
    ids, logprobs = np.roll(ids, -1, axis=1), np.roll(logprobs, -1, axis=1)
    repeats = (ids[:, :-1] == ids[:, -1:]).any(1)
    ids[repeats, -1], logprobs[repeats, -1] = -1, -np.inf
    return LikelyTokens(ids=ids, logprobs=logprobs)
