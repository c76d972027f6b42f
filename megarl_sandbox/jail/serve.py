"""Serve a program's functions and objects to its test code, which runs in another process.

Nothing here is safe from the program, nor has to be: all that a program can do is to answer, and what it answers is
judged elsewhere.
"""

import builtins
import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Any

from megarl_sandbox.jail.channel import Channel
from megarl_sandbox.jail.usual import USUAL
from megarl_sandbox.jail.values import array, attributes_of, is_builtin_class, pack, unpack


class LentObject:
    """A function or iterator of the test code that was passed to the program."""

    def __init__(self, server: "Server", number: int) -> None:
        self._server, self._number = server, number

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._server.ask(self._number, "call", args, kwargs)

    def __iter__(self) -> "LentObject":
        return self

    def __next__(self) -> Any:
        return self._server.ask(self._number, "next", (), {})


class Server:
    """The program's side: answers one request after the other until the test code has ended.

    by_value: names of the classes that both sides have, whose objects cross with their attributes.
    """

    def __init__(self, names: dict[str, Any], by_value: Collection[str], channel: Channel) -> None:
        self._names, self._channel = names, channel
        self._by_value: dict[str, type[Any] | None] = dict.fromkeys(by_value)
        self._held: list[Any] = []
        self._numbers: dict[int, int] = {}

    def serve(self) -> None:
        """Answer requests until the other side ends."""
        while True:
            try:
                request = self._channel.receive()
            except EOFError:
                return
            self._channel.send(self._answer(request))

    def ask(self, number: int, operation: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Have the test code use a function or iterator that it lent."""
        written, _ = pack([args, kwargs], self._describe)
        self._channel.send({"lent": number, "operation": operation, **written})
        answer = self._channel.receive()
        if "raised" in answer:
            raise getattr(builtins, answer["raised"])(answer["text"])
        return unpack(answer, self._restore)[0][0]

    def _answer(self, request: dict[str, Any]) -> dict[str, Any]:
        try:
            (target, args, kwargs), known = unpack(request, self._restore)
            value = _OPERATIONS[request["operation"]](self, target, request["name"], args, kwargs)
            written, _ = pack([value], self._describe, known)
            # Values that the call left as they were are not sent back.
            for number, node in enumerate(request["nodes"]):
                if written["nodes"][number] == node:
                    written["nodes"][number] = None
            return written
        except BaseException as error:
            return {"raised": [kind.__name__ for kind in type(error).__mro__], "text": str(error)[:1000]}

    def _describe(self, value: Any) -> list[Any]:
        """Write an object: by value if both sides have its class, else as a number under which it is kept."""
        if isinstance(value, LentObject):
            return ["lent", value._number]
        if value is NotImplemented:
            return ["not implemented"]
        if isinstance(value, type):
            if is_builtin_class(value):
                return ["builtin", value.__name__]
            if issubclass(value, BaseException):
                return ["error", *(kind.__name__ for kind in value.__mro__)]
        elif type(value).__name__ in self._by_value:
            return ["object", type(value).__name__, attributes_of(value)]
        number = self._numbers.setdefault(id(value), len(self._held))
        if number == len(self._held):
            self._held.append(value)
        return ["coroutine" if inspect.iscoroutine(value) else "held", number]

    def _restore(self, kind: str, words: list[Any]) -> Any:
        match kind:
            case "object":
                # The program's class of this name, or else one without methods.
                known = self._names.get(words[0]) or self._by_value.get(words[0]) or type(words[0], (), {})
                self._by_value[words[0]] = known
                return object.__new__(known)
            case "held":
                return self._held[words[0]]
            case "array":
                return array(*words)
            case "builtin":
                return getattr(builtins, words[0])
        return LentObject(self, words[0])

    def names(self) -> list[str]:
        """Return the global names that the program itself defines."""
        return [name for name, value in self._names.items() if name not in USUAL or USUAL[name] is not value]

    def find(self, name: str) -> Any:
        """Return the value of a global name of the program."""
        return self._names[name]


def _set(server: Server, target: Any, name: str, args: Any, kwargs: Any) -> None:
    setattr(target, name, args[0])


def _awaited(coroutine: Any) -> Any:
    # Slow to import, and seldom needed.
    import asyncio

    return asyncio.run(coroutine)


_OPERATIONS: Mapping[str, Callable[[Server, Any, str, Any, Any], Any]] = {
    "names": lambda server, target, name, args, kwargs: server.names(),
    "find": lambda server, target, name, args, kwargs: server.find(name),
    "get": lambda server, target, name, args, kwargs: getattr(target, name),
    "set": _set,
    "call": lambda server, target, name, args, kwargs: target(*args, **kwargs),
    "special": lambda server, target, name, args, kwargs: getattr(type(target), name)(target, *args),
    "await": lambda server, target, name, args, kwargs: _awaited(target),
    "truth": lambda server, target, name, args, kwargs: bool(target),
    "is a": lambda server, target, name, args, kwargs: isinstance(target, args[0]),
    "state": lambda server, target, name, args, kwargs: [type(target).__qualname__, attributes_of(target)],
}
