"""Keep the images of what environments and agents say, and write the tokens by which the policy reads them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np

from megarl.data.images import DataImages
from megarl.types import Message, RowImage
from megarl.types.turns import IMAGE_MARK

# Tokens that the policy reads, what they show, and where in them the texts are that it learns to predict.
Read: TypeAlias = tuple[tuple[int, ...], tuple[RowImage, ...], tuple[tuple[int, int], ...]]


@dataclass(frozen=True, slots=True)
class ReplyImages:
    """The images of conversations. data: what keeps and reads them; None: conversations are texts alone."""

    data: DataImages | None

    @property
    def read(self) -> Callable[[object], str] | None:
        """Return what keeps an image and returns its digest."""
        return None if self.data is None else self.data.read

    def sent(self, message: Message) -> Message:
        """Return a message of the data with data URLs in the place of digests, as agents send them."""
        if self.data is None or not message.images:
            return message
        return replace(message, images=tuple(map(self.data.url_of, message.images)))

    def kept(self, message: Message) -> Message:
        """Return a message with the digests of its images, which are kept. Raises ValueError or DataError if it
        cannot be read.
        """
        if not message.images:
            return message
        if self.data is None:
            raise ValueError("a message shows images, but the run reads texts alone; set data.image_key")
        if (count := message.content.count(IMAGE_MARK)) != (num := len(message.images)):
            raise ValueError(f"a message has {count} marks {IMAGE_MARK} for {num} images; write one where each stands")
        return replace(message, images=tuple(map(self.data.read, message.images)))

    def expanded(self, ids: Sequence[int], chat: Sequence[Message], texts: Sequence[tuple[int, int]] = ()) -> Read:
        """Return the tokens of a chat with those of its images. texts: bounds in `ids`."""
        if self.data is None:
            return tuple(ids), (), tuple(texts)
        found = self.data.expand(ids, chat, "the conversation")
        # Nothing learns to predict an image.
        own = np.array([any(start <= i < end for start, end in texts) for i in found.origins], dtype=np.int8)
        edges = np.flatnonzero(np.diff(own, prepend=0, append=0)).tolist()
        return tuple(found.token_ids), found.images, tuple(zip(edges[::2], edges[1::2], strict=True))
