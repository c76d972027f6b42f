"""Define what a dialect is: it reads requests as chat completions, and writes completions as its clients want them."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, ClassVar, TypeAlias

from megarl.data.images import shows_image
from megarl.environments.chat import Chat
from megarl.environments.chat_requests import RequestError

Json: TypeAlias = Mapping[str, Any]


class Dialect(ABC):
    """A form of requests for turns and of their answers.

    path: of its route. count_path: of the route that counts the tokens of a request. id_prefix: the beginning of the
    ids of its completions. has_thoughts: thoughts have a place of their own in its answers, and its clients need not
    send them back; else they are text.
    """

    path: ClassVar[str]
    count_path: ClassVar[str] = ""
    id_prefix: ClassVar[str]
    has_thoughts: ClassVar[bool] = True

    @abstractmethod
    def read(self, body: Json, chat: Chat) -> Json:
        """Return a request in the form of chat completions. Raises RequestError for what cannot be honoured."""

    @abstractmethod
    def write(self, completion: Json, body: Json, chat: Chat) -> Json:
        """Return a completion in this form, for the request `body`."""

    @abstractmethod
    def events(self, written: Json, body: Json) -> Iterator[str]:
        """Yield what `write` returned as server-sent events."""

    def error(self, status: int, message: str) -> Json:
        """Return an error in this form: OpenAI's."""
        return {"error": {"message": message, "type": "invalid_request_error", "param": None, "code": None}}

    def count(self, num_tokens: int) -> Json:
        """Return the answer of `count_path`."""
        return {"input_tokens": num_tokens}


def content_of(content: object, place: str, kinds: Sequence[str] = ("text",)) -> str | list[Json]:
    """Return a content's text, as `text_of` does; with images, a list of parts in the form of chat completions."""
    if not isinstance(content, list) or not any(map(shows_image, content)):
        return text_of(content, place, kinds)
    parts: list[Json] = []
    for is_image, group in groupby(content, shows_image):
        own = list(group)
        parts += own if is_image else [{"type": "text", "text": text_of(own, place, kinds)}]
    return parts


def text_of(content: object, place: str, kinds: Sequence[str] = ("text",)) -> str:
    """Return a content's text, parts of these kinds a line each. Raises RequestError for a part that is not text."""
    if isinstance(content, str) or content is None:
        return content or ""
    if not isinstance(content, list):
        raise RequestError(f"{place} is {str(content)[:80]}, expected a text or a list of parts")
    lines = []
    for i, part in enumerate(content):
        if not isinstance(part, dict) or part.get("type") not in kinds or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, dict) else str(part)[:80]
            raise RequestError(f"{place}[{i}] is {kind!r}, expected text alone: {' or '.join(kinds)}")
        lines.append(part["text"])
    return "\n".join(lines)
