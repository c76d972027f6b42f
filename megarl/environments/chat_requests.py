"""Read an agent's requests of a chat: which fields count, and which parts of a message are compared."""

import contextlib
import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from megarl.data.images import read_parts, shows_image
from megarl.errors import ConfigError, DataError

T = TypeVar("T")

# Fields of a request, vLLM's among them, that ask for what a policy in training cannot have, with the values that do
# not. Every other field that is not read, such as temperature, is ignored: the run's settings decide how turns are
# sampled.
REFUSED: Mapping[str, tuple[object, ...]] = {
    **dict.fromkeys(
        ("functions", "structured_outputs", "stop_token_ids", "bad_words", "chat_template_kwargs"), ({}, [])
    ),
    **dict.fromkeys((f"guided_{kind}" for kind in ("json", "regex", "choice", "grammar")), ({}, [], "")),
    **dict.fromkeys(("continue_final_message", "ignore_eos", "echo"), (False,)),
    **dict.fromkeys(("function_call", "chat_template"), ("none", "")),
    "min_tokens": (0,),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "response_format": ({"type": "text"},),
    "tool_choice": ("auto", "none"),
    "logit_bias": ({},),
}
MOST_STOPS, MOST_STOP_CHARS = 16, 1000
# As many sub-agents may take turns such that what each one's requests repeat is recognised.
MOST_REPEATED = 8
ROLES = ("system", "developer", "user", "assistant", "tool")


class RequestError(ValueError):
    """A request that is not answered; the agent is told why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """The parts of a message that are compared: who said it, the text, the digests of images, each call's name and
    arguments.

    call_ids: by which the calls are known, even if a client sends them back with other arguments.
    """

    role: str
    text: str
    images: tuple[str, ...] = ()
    calls: tuple[tuple[str, str], ...] = ()
    call_ids: tuple[str, ...] = field(default=(), compare=False)


def refuse_fields(body: Mapping[str, object]) -> None:
    """Raise RequestError for fields that cannot be honoured, and must not be ignored."""
    for name, harmless in REFUSED.items():
        if body.get(name) is not None and body[name] not in harmless:
            raise RequestError(f"{name} is {body[name]!r}, expected it to be left out")
    for name in ("n", "max_tokens", "max_completion_tokens"):
        if (limit := body.get(name)) is not None and (not isinstance(limit, int) or limit < 1):
            raise RequestError(f"{name} is {limit!r}, expected a whole number of at least 1")


def read_stop(body: Mapping[str, object]) -> tuple[str, ...]:
    """Return the texts at which a request wants its answer to end. Raises RequestError for too many."""
    stop = body.get("stop") or []
    stop = [stop] if isinstance(stop, str) else stop
    if not isinstance(stop, list) or not all(isinstance(each, str) for each in stop):
        raise RequestError(f"stop is {str(stop)[:80]}, expected a text or a list of texts")
    # Engines look for each of them after each token.
    if len(stop) > MOST_STOPS or any(len(each) > MOST_STOP_CHARS for each in stop):
        raise RequestError(
            f"stop has {len(stop)} texts, expected up to {MOST_STOPS} of up to {MOST_STOP_CHARS} characters"
        )
    return tuple(each for each in stop if each)


def before_stop(text: str, stop: Sequence[str]) -> tuple[str, str | None]:
    """Return the text before the first of the texts that end it, and that one; all of it and None if there is none.

    >>> before_stop("2 + 2 is 4. So", ["So", "."])
    ('2 + 2 is 4', '.')
    """
    places = [(place, each) for each in stop if (place := text.find(each)) >= 0]
    if not places:
        return text, None
    place, found = min(places, key=lambda each: each[0])
    return text[:place], found


def in_order_of_calls(messages: Sequence[Any], first: int = 0) -> list[Any]:
    """Return messages with the results of each turn's calls in the order of its calls, by which templates tell them
    apart. Raises RequestError for results that belong to no call, and for calls of which only some have one.

    first: the number of the first one, for errors.
    """
    ordered: list[Any] = []
    ids: list[Any] = []
    for is_result, group in itertools.groupby(messages, lambda message: _field(message, "role") == "tool"):
        run = list(group)
        named = [_field(message, "tool_call_id") for message in run]
        if is_result and ids and all(named):
            if sorted(map(str, named)) != sorted(map(str, ids)):
                raise RequestError(
                    f"messages[{first + len(ordered)}] has results of the calls {named}, expected one of each call "
                    f"before it, {ids}"
                )
            run.sort(key=lambda message: ids.index(message["tool_call_id"]))
        ordered += run
        ids = [_field(call, "id") for call in _field(run[-1], "tool_calls") or ()]
    return ordered


class Repeated(Generic[T]):
    """The messages of the last requests of a sample as they were sent, and what was made of each."""

    def __init__(self) -> None:
        self._kept: list[tuple[list[Any], list[T]]] = []

    def find(self, messages: list[Any]) -> list[T]:
        """Return what was made of the first messages, as many as an earlier request had, too, and replace these by the
        earlier ones, so that texts are kept once.
        """

        def num_same(kept: list[Any]) -> int:
            pairs = enumerate(zip(kept, messages, strict=False))
            return next((i for i, (one, other) in pairs if one != other), min(len(kept), len(messages)))

        found = ((num_same(kept), kept, made) for kept, made in self._kept)
        num, kept, made = max(found, key=lambda each: each[0], default=(0, [], []))
        messages[:num] = kept[:num]
        return made[:num]

    def keep(self, messages: list[Any], made: list[T]) -> None:
        """Keep a request in the place of those that it repeats whole."""
        others = [each for each in self._kept if messages[: len(each[0])] != each[0]]
        self._kept = [(messages, made), *others][:MOST_REPEATED]


class MessageReader:
    """Reads the messages of a sample's requests, in time that grows with what is new in them.

    calling: the answers with calls, by the ids of these. changed: those that came back with other arguments, by the
    same.
    """

    def __init__(self) -> None:
        self.calling: dict[tuple[str, ...], Said] = {}
        self.changed = set[tuple[str, ...]]()
        self._repeated = Repeated[Said]()

    def read(self, messages: object, read_image: Callable[[object], str] | None) -> list[Said]:
        """Read what counts of a request's messages, of which some may have been read.

        Raises RequestError if there are none, and as `read_message` does.
        """
        if not isinstance(messages, list) or not messages:
            raise RequestError("messages is missing or empty, expected the whole conversation so far")
        known = self._repeated.find(messages)
        # Results of tools belong to the last answer that is known.
        num = max((i for i, each in enumerate(known) if each.role == "assistant"), default=0)
        known = known[: num + 1]
        ordered = enumerate(in_order_of_calls([*known[num:], *messages[len(known) :]], num), num)
        read = [
            each if isinstance(each, Said) else read_message(each, f"messages[{i}]", read_image) for i, each in ordered
        ]
        said = [*known[:num], *map(self._as_written, read)]
        # Images as they are sent are large.
        if not any(each.images for each in said):
            self._repeated.keep(messages, said)
        return said

    def _as_written(self, said: Said) -> Said:
        """Return a message, or the answer that it is by the ids of its calls: clients may change arguments."""
        known = self.calling.get(said.call_ids, said)
        if known != said:
            self.changed.add(said.call_ids)
        return known


def _field(message: object, name: str) -> Any:
    if isinstance(message, Said):
        return message.role if name == "role" else name == "tool_calls" and [{"id": each} for each in message.call_ids]
    return message.get(name) if isinstance(message, dict) else None


def _no_image(_: object) -> str:
    raise DataError("got an image, expected text alone: the run has no data.image_key")


def read_message(message: object, place: str, read_image: Callable[[object], str] | None = None) -> Said:
    """Read what counts of a message; `read_image` keeps an image and returns its digest, None: it must be text.

    Raises RequestError for parts of other types, and for images that cannot be read.
    """
    if not isinstance(message, dict) or message.get("role") not in ROLES:
        raise RequestError(f"{place} is {str(message)[:80]}, expected an object with a role among {', '.join(ROLES)}")
    content = message.get("content") or ""
    text, images = (content, ()) if isinstance(content, str) else _read_content(content, place, read_image)
    if images and message["role"] == "assistant":
        raise RequestError(f"{place}.content has an image, expected text alone, as the policy writes no other")
    calls = []
    for call in message.get("tool_calls") or ():
        function = call.get("function") or {}
        arguments = function.get("arguments", "")
        with contextlib.suppress(ValueError, TypeError, RecursionError):
            # Clients may write the same arguments in another way; JavaScript's have no 1.0.
            arguments = _ENCODER.encode(_DECODER.decode(arguments))
        calls.append((str(function.get("name")), str(arguments)))
    # Clients may also strip the answers that they repeat.
    return Said(
        role=message["role"],
        text=text.strip() if message["role"] == "assistant" else text,
        images=images,
        calls=tuple(calls),
        call_ids=tuple(str(call.get("id")) for call in message.get("tool_calls") or ()),
    )


def _read_content(
    parts: Sequence[object], place: str, read_image: Callable[[object], str] | None
) -> tuple[str, tuple[str, ...]]:
    """Return the text of a message's parts, and the digests of its images."""
    known = [each for each in parts if isinstance(each, dict) and (each.get("type") == "text" or shows_image(each))]
    if len(known) < len(parts):
        raise RequestError(f"{place}.content has a part that is neither text nor an image, expected these alone")
    try:
        return read_parts(known, read_image or _no_image)
    except (ConfigError, DataError) as error:
        raise RequestError(f"{place}.content: {error}") from error


def _number(digits: str) -> float | int:
    """Return a number as JavaScript would write it."""
    value = float(digits)
    return int(value) if value.is_integer() else value


_DECODER, _ENCODER = json.JSONDecoder(parse_float=_number), json.JSONEncoder(sort_keys=True)
