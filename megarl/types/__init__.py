"""Define the typed data of each stage: Prompt → Sample → RolloutBatch → ScoredBatch → Row → RowBatch.

Per-token arrays cover the *response*: entry t belongs to the token (the label) at position `num_prompt_tokens + t`, not
to the position that predicts it. The shift by one happens in a single place, when rows are packed for the model.
Types on the host hold numpy arrays, which Ray's shared memory passes on without a copy. `ScoredBatch` and `RowBatch`,
on which algorithms compute, hold torch tensors padded to [B, T].

Glossary: `rollout_logprobs` come from the sampling engine, `old_logprobs` from the trainer with the weights at the
start of the step, `logprobs` from the current policy, `ref_logprobs` from a frozen reference. A *group* is all samples
of one prompt, found by uid, never by position. A *nucleus* is the set of tokens that top-k and top-p left to sample a
token from; log-probs of this token are then those of the distribution over them. `loss_mask` marks the tokens that
train: those that the policy sampled, and demonstrations.
"""

from typing import TYPE_CHECKING

from megarl.types.arrays import (
    BoolArray,
    ExpertArray,
    FloatArray,
    IdArray,
    IntArray,
    LikelyTokens,
    NucleusArray,
    VersionSpan,
    token_versions,
    version_spans,
)
from megarl.types.images import RowImage
from megarl.types.rows import Row, Rows, TokenQuantity, row_from_sample, row_read_at_end
from megarl.types.samples import (
    DROPPED,
    ChatPart,
    Episode,
    FinishReason,
    Message,
    Prompt,
    Reward,
    RolloutBatch,
    Sample,
    Segment,
    SegmentSource,
    environment_segment,
    prompt_segment,
)

if TYPE_CHECKING:
    from megarl.types.batches import (
        Advantages,
        ModelOutputs,
        PolicyOutputs,
        RowBatch,
        ScoredBatch,
        ValueOutputs,
        length_blocks,
        pad_rows,
        row_batch,
        scored_batch,
    )
    from megarl.types.objectives import PAIRS, Algorithm, AlgoState, Denominators, EntropyState, LossSums, Objective

__all__ = [
    "DROPPED",
    "PAIRS",
    "Advantages",
    "AlgoState",
    "Algorithm",
    "BoolArray",
    "ChatPart",
    "Denominators",
    "EntropyState",
    "Episode",
    "ExpertArray",
    "FinishReason",
    "FloatArray",
    "IdArray",
    "IntArray",
    "LikelyTokens",
    "LossSums",
    "Message",
    "ModelOutputs",
    "NucleusArray",
    "Objective",
    "PolicyOutputs",
    "Prompt",
    "Reward",
    "RolloutBatch",
    "Row",
    "RowBatch",
    "RowImage",
    "Rows",
    "Sample",
    "ScoredBatch",
    "Segment",
    "SegmentSource",
    "TokenQuantity",
    "ValueOutputs",
    "VersionSpan",
    "environment_segment",
    "length_blocks",
    "pad_rows",
    "prompt_segment",
    "row_batch",
    "row_from_sample",
    "row_read_at_end",
    "scored_batch",
    "token_versions",
    "version_spans",
]

if not TYPE_CHECKING:  # with it, a type checker would accept any name

    def __getattr__(name: str) -> object:
        """Import names that need torch on first use, so that processes without torch can import this package."""
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from megarl.types import batches, objectives

        return next(getattr(module, name) for module in (batches, objectives) if hasattr(module, name))
