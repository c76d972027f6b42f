"""Write conversations as text: who wrote what, and what it earned."""

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from megarl.types import Sample, Segment, SegmentSource
from megarl.types.images import shifted

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """A part of a response that one author wrote: `policy`, `environment` or `demonstration`.

    reward: what the environment gave for the policy's turn that ends here. parent: where a branch begins, the place of
    the turn that this one follows, -1 for the prompt; None: it follows the turn before. num_kept: the first tokens of
    the parent that the branch has before it.
    """

    author: str
    text: str
    reward: float = 0.0
    num_tokens: int = 0
    parent: int | None = None
    num_kept: int = 0

    @property
    def is_read(self) -> bool:
        """Return whether the policy only read this part, so that it does not train on it."""
        return self.author == SegmentSource.ENVIRONMENT

    @property
    def is_given(self) -> bool:
        """Return whether a demonstration has this part, so that the policy trains on it but did not sample it."""
        return self.author == SegmentSource.DEMONSTRATION


TURNS_TYPE = pa.list_(
    pa.struct(
        [
            ("author", pa.string()),
            ("text", pa.string()),
            ("reward", pa.float64()),
            ("num_tokens", pa.int64()),
            ("parent", pa.int64()),
            ("num_kept", pa.int64()),
        ]
    )
)


def prompt_text(sample: Sample, tokenizer: "PreTrainedTokenizerBase") -> str:
    """Return a sample's prompt as text, with `<image DIGEST>` in the place of the tokens that show an image."""
    return _text_of(sample.segments[:1], tokenizer)


def _text_of(segments: Sequence[Segment], tokenizer: "PreTrainedTokenizerBase") -> str:
    ids = [token for segment in segments for token in segment.token_ids.tolist()]
    lengths = accumulate((len(each.token_ids) for each in segments), initial=0)
    images = [image for each, begin in zip(segments, lengths, strict=False) for image in shifted(each.images, begin)]
    parts, start = list[str](), 0
    for image in images:
        parts += [str(tokenizer.decode(ids[start : image.places[0]])), f"<image {image.digest}>"]
        start = int(image.places[-1]) + 1
    return "".join([*parts, str(tokenizer.decode(ids[start:]))])


def turns_of(sample: Sample, tokenizer: "PreTrainedTokenizerBase") -> tuple[Turn, ...]:
    """Split a response into turns, each written by one author; () if the policy wrote all and nobody replied."""
    if sample.episode is None and all(each.source is SegmentSource.POLICY for each in sample.segments[1:]):
        return ()
    turns: list[Turn] = []
    forks = {fork.start: fork.after for fork in sample.forks}
    starts, end = [0], len(sample.prompt_token_ids)
    # The text that an engine wrote before and after a resume is one part.
    for author, group in groupby(sample.segments[1:], lambda segment: segment.source):
        segments = list(group)
        num_tokens = sum(len(segment.token_ids) for segment in segments)
        parent, num_kept = None, 0
        # An empty turn may begin a branch, too.
        if (after := forks.pop(end, None)) is not None:
            place = bisect_right(starts, max(after, 0)) - 1
            parent, num_kept = place - 1, after + 1 - starts[place]
        starts.append(end)
        end += num_tokens
        turns.append(
            Turn(
                author=author.value,
                text=_text_of(segments, tokenizer),
                reward=sum(segment.reward for segment in segments),
                num_tokens=num_tokens,
                parent=parent,
                num_kept=num_kept,
            )
        )
    return tuple(turns)


def read_turns(rows: Iterable[Mapping[str, Any]] | None) -> tuple[Turn, ...]:
    """Return the turns of a row of a parquet file; none where the file has none.

    Files of earlier versions have the text of each token instead of their number, or no branches.
    """
    return tuple(
        Turn(
            author=row["author"],
            text=row["text"],
            reward=row["reward"],
            num_tokens=row.get("num_tokens") or len(row.get("tokens", ())),
            parent=row.get("parent"),
            num_kept=row.get("num_kept") or 0,
        )
        for row in rows or ()
    )


def last_turn(turns: tuple[Turn, ...], response: str) -> str:
    """Return the text after the last reply of an environment: the whole response where there are no turns."""
    replies = [i for i, turn in enumerate(turns) if turn.is_read]
    return "".join(turn.text for turn in turns[max(replies, default=-1) + 1 :]) if turns else response
