"""Write conversations as text: who wrote what, what it earned, and how likely the policy found its own tokens."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from megarl.data.chat import token_texts
from megarl.types import Sample, SegmentSource

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """A part of a response that one author wrote: `policy`, `environment` or `demonstration`.

    reward: what the environment gave for the policy's turn that ends here. tokens, logprobs: the text of each token and
    the engine's log-prob of it, 0 where no engine sampled it; empty if they were not recorded.
    """

    author: str
    text: str
    reward: float = 0.0
    tokens: tuple[str, ...] = ()
    logprobs: tuple[float, ...] = ()

    @property
    def is_read(self) -> bool:
        """Return whether the policy only read this part, so that it does not train on it."""
        return self.author == SegmentSource.ENVIRONMENT


TURNS_TYPE = pa.list_(
    pa.struct(
        [
            ("author", pa.string()),
            ("text", pa.string()),
            ("reward", pa.float64()),
            ("tokens", pa.list_(pa.string())),
            ("logprobs", pa.list_(pa.float64())),
        ]
    )
)


def turns_of(sample: Sample, tokenizer: "PreTrainedTokenizerBase", *, with_tokens: bool = False) -> tuple[Turn, ...]:
    """Return a sample's response by authors; nothing if it has no conversation."""
    if sample.episode is None:
        return ()
    turns = []
    # What an engine wrote before and after a resume is one part.
    for author, group in groupby(sample.segments[1:], lambda segment: segment.source):
        segments = list(group)
        ids = [token for segment in segments for token in segment.token_ids.tolist()]
        logprobs = (
            logprob
            for s in segments
            for logprob in ([0.0] * len(s.token_ids) if s.rollout_logprobs is None else s.rollout_logprobs.tolist())
        )
        turns.append(
            Turn(
                author=author.value,
                text=str(tokenizer.decode(ids)),
                reward=sum(segment.reward for segment in segments),
                tokens=tuple(token_texts(tokenizer, ids)) if with_tokens else (),
                logprobs=tuple(logprobs) if with_tokens else (),
            )
        )
    return tuple(turns)


def read_turns(rows: Iterable[Mapping[str, Any]] | None) -> tuple[Turn, ...]:
    """Return the turns of a row of a parquet file; none where the file has none."""
    return tuple(
        Turn(**{**row, "tokens": tuple(row["tokens"]), "logprobs": tuple(row["logprobs"])}) for row in rows or ()
    )


def last_turn(turns: tuple[Turn, ...], response: str) -> str:
    """Return the text after the last reply of an environment: the whole response where there are no turns."""
    replies = [i for i, turn in enumerate(turns) if turn.is_read]
    return "".join(turn.text for turn in turns[max(replies, default=-1) + 1 :]) if turns else response
