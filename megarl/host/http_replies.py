"""Bound the size of HTTP replies from any server, because one reply could fill the memory of this host."""

from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

from megarl.errors import LargeReplyError

if TYPE_CHECKING:
    from httpx import Response

# More than anything that a run asks for.
MOST_BYTES = 64 << 20


async def _bound(reply: "Response") -> None:
    async def parts(chunk_size: int | None = None) -> AsyncIterator[bytes]:
        num_bytes = 0
        async for part in type(reply).aiter_bytes(reply, chunk_size):
            if (num_bytes := num_bytes + len(part)) > MOST_BYTES:
                raise LargeReplyError(f"got more than {MOST_BYTES} bytes")
            yield part

    # A stream of events may have no end; the client of MCP bounds each of them.
    if not reply.headers.get("content-type", "").startswith("text/event-stream"):
        reply.aiter_bytes = parts  # type: ignore[method-assign]


# The `event_hooks` of every client of httpx, and of its likes.
BOUNDED = {"response": [_bound]}
