"""Segments of samples by hand."""

from collections.abc import Sequence

import numpy as np

from megarl.types import Segment, SegmentSource, version_spans


def policy_segment(token_ids: Sequence[int], logprob: float = -1.0) -> Segment:
    """What the policy wrote, every token with the same rollout log-prob."""
    n = len(token_ids)
    return Segment(
        source=SegmentSource.POLICY,
        token_ids=np.asarray(token_ids, dtype=np.int32),
        loss_mask=np.ones(n, dtype=np.bool_),
        versions=version_spans(np.zeros(n, dtype=np.int64)),
        rollout_logprobs=np.full(n, logprob, dtype=np.float32),
    )


def demonstration_segment(token_ids: Sequence[int]) -> Segment:
    """What a demonstration wrote: it trains, no engine sampled it."""
    n = len(token_ids)
    return Segment(
        source=SegmentSource.DEMONSTRATION,
        token_ids=np.asarray(token_ids, dtype=np.int32),
        loss_mask=np.ones(n, dtype=np.bool_),
        versions=version_spans(np.full(n, -1, dtype=np.int64)),
    )
