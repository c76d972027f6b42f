"""Find the tokens that truncated sampling left to choose from, in the log-probs that vLLM returns."""

import numpy as np

from megarl.types import FloatArray, IdArray, NucleusArray


def nucleus_of(ids: IdArray, logprobs: FloatArray) -> tuple[NucleusArray, FloatArray]:
    """Return the tokens that each token was sampled from (see `Segment`), and its log-prob among them.

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
    return np.where(finite, kept, -1)[:, :width], logprobs[:, 0] - np.log(mass)
