"""Define what judges ask of a language model, wherever it runs."""

from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

from megarl.types import Message


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A chat that a model continues. Requests with the same chat and another seed are samples of their own."""

    messages: tuple[Message, ...]
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgeCompletion:
    """The reply of a model; `text` is None if it could not be asked, and then `reason` says why in one line.

    tokens: read and written. is_refused: every endpoint refused the request because of its settings.
    """

    text: str | None
    reason: str = ""
    tokens: int = 0
    seconds: float = 0.0
    is_cached: bool = False
    is_refused: bool = False


class Completions(Protocol):
    """A language model that continues chats.

    is_deferred: whether requests wait for `flush`, because the model shares its devices with others.
    """

    is_deferred: bool

    def submit(self, request: Request) -> Future[JudgeCompletion]:
        """Ask, and return a future of the answer, without waiting. The future may raise RunError."""

    def flush(self) -> None:
        """Start, and wait for, all requests that `submit` has put off."""

    def close(self) -> None:
        """End all processes and connections that were opened for the model."""
