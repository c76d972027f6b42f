"""An OpenAI-compatible endpoint that writes what a function of the user message says, on a real socket."""

import itertools
from collections.abc import Callable
from typing import Any

from tests.helpers.reward_server import RewardServer, reply

TOKENS_PER_REQUEST = 7


class ChatServer(RewardServer):
    """`write` gets the last message of a request and its seed; an integer from it is the status of a failure.

    finish_reason: how the answers end.
    """

    def __init__(
        self, write: Callable[[str, int], str | int], finish_reason: str | None = "stop", **slowness: float
    ) -> None:
        super().__init__(self._answer, **slowness)
        self.finish_reason = finish_reason
        self.write, self.ids = write, itertools.count()
        self.listing = {"object": "list", "data": [{"id": "tiny", "object": "model", "created": 0, "owned_by": "us"}]}

    @property
    def base(self) -> str:
        return self.url.replace("/get_reward", "/v1")

    @property
    def texts(self) -> list[str]:
        """The user messages of all requests."""
        return [str(body["messages"][-1]["content"]) for body in self.requests]

    def _answer(self, body: dict[str, Any]) -> tuple[int, bytes]:
        text = self.write(body["messages"][-1]["content"], body["seed"])
        if isinstance(text, int):
            return reply(text, error={"message": f"refused with {text}"})
        message = {"role": "assistant", "content": text}
        return reply(
            id=f"chat-{next(self.ids)}",
            object="chat.completion",
            created=0,
            model=body["model"],
            choices=[{"index": 0, "message": message, "finish_reason": self.finish_reason}],
            usage={"prompt_tokens": 5, "completion_tokens": 2, "total_tokens": TOKENS_PER_REQUEST},
        )
