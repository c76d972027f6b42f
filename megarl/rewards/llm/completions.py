"""Define what judges ask of a language model, wherever it runs."""

from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

from megarl.types import FinishReason, Message

# How servers name the end of an answer that the model ended itself; None: they do not tell.
_WHOLE = frozenset({None, "stop", "eos", "eos_token", "end_turn", "stop_sequence"})


def is_whole(finish_reason: str | None) -> bool:
    """Return whether a model's answer is whole: not cut at a limit, withheld by a filter, or given up.

    >>> [is_whole(reason) for reason in ("stop", "length", "content_filter", None)]
    [True, False, False, True]
    """
    return (finish_reason.casefold() if finish_reason else None) in _WHOLE


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A chat that a model continues. Requests with the same chat and another seed are samples of their own."""

    messages: tuple[Message, ...]
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgeCompletion:
    """The reply of a model; `text` is None if it could not be asked, and then `reason` says why in one line.

    finish_reason: how the text ended; one that is not whole states no verdict. tokens: read and written. is_refused:
    every endpoint refused the request because of its settings.
    """

    text: str | None
    reason: str = ""
    finish_reason: str | None = FinishReason.STOP
    tokens: int = 0
    seconds: float = 0.0
    is_cached: bool = False
    is_refused: bool = False

    @property
    def unread(self) -> str:
        """Return why the text must not be read as a verdict, empty if it may be."""
        if is_whole(self.finish_reason):
            return ""
        remedy = "; raise sampling.max_tokens" if self.finish_reason == FinishReason.LENGTH else ""
        return f"the judge's answer was cut (finish_reason {self.finish_reason}){remedy}"


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
