"""Stand in for a program's functions and objects in the process of its test code.

A call goes to the program's process, and its result comes back as plain data (`values.py`), so that every comparison,
`abs`, `all` or `isinstance` of the test is one of real builtins on real data. Other values stay where they are, and
a `RemoteObject` stands for each. It equals no data, and takes part in no arithmetic: that would show the program
what is expected of it. Only objects that the test itself makes of a class (`Vector(1, 2) + Vector(3, 4)`) do.
"""

import builtins
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from megarl_sandbox.jail.channel import Channel
from megarl_sandbox.jail.values import array, attributes_of, is_builtin_class, pack, unpack

# Whoever reads these of an object takes it for data, and may hand it what is expected.
_OF_DATA = {name for kind in (str, bytes, int, float, list, tuple, dict, set) for name in dir(kind)}
_DESCRIPTIVE = {"__name__", "__qualname__", "__doc__"}
_CONTAINERS = ("list", "set", "dict", "deque", "bytearray", "object")
# Raised by a call, these would end a loop of the test early, or the test as if its user had interrupted it.
_NEVER_RAISED = ("StopIteration", "StopAsyncIteration", "GeneratorExit", "KeyboardInterrupt")


class BrokenProgram(BaseException):
    """The error of a program that ended, or whose answer cannot be read. Test code must not catch it."""


class Peer:
    """The program in its other process, as the test code sees it. `classes`: those of objects that cross by value."""

    def __init__(self, channel: Channel, classes: Mapping[str, type[Any]]) -> None:
        self.is_broken = False
        self._channel = channel
        self._classes = dict(classes)
        self._errors: dict[str, type[BaseException]] = {}
        self._lent: list[Any] = []
        self._compared: set[tuple[int, int]] = set()
        # The objects that the test made of each class, with the arguments; names of classes whose objects were equal.
        self.made: list[tuple[RemoteObject, Any, RemoteObject]] = []
        self._equal: set[str] = set()

    def ask(
        self,
        operation: str,
        target: Any,
        name: str = "",
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Have the program do something, and return its answer, or raise what it raised."""
        if self.is_broken:
            raise BrokenProgram("the program has ended")
        written, objects = pack([target, tuple(args), dict(kwargs or {})], self._describe)
        try:
            self._channel.send({"operation": operation, "name": name, **written})
            while "lent" in (answer := self._channel.receive()):
                self._channel.send(self._use_lent(answer))
            if "raised" not in answer:
                self._check_kinds(written["nodes"], answer["nodes"])
                return unpack(answer, self._restore, objects)[0][0]
            text, raised = str(answer["text"]), [str(each) for each in answer["raised"]]
        except (EOFError, OSError, ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
            self.is_broken = True
            raise BrokenProgram(f"{type(error).__name__}: {error}") from error
        raise self._error(raised, text, may_stop=name == "__next__")

    def have_equal_states(self, one: "RemoteObject", other: "RemoteObject") -> bool:
        """Compare two objects by their classes' names and their attributes."""
        pair = object.__getattribute__(one, "_number"), object.__getattribute__(other, "_number")
        if pair[0] == pair[1] or pair in self._compared:
            return True
        self._compared.add(pair)
        try:
            states = [self.ask("state", each) for each in (one, other)]
        finally:
            self._compared.discard(pair)
        is_equal = bool(states[0][1]) and bool(states[0] == states[1])
        if is_equal:
            self._equal.add(str(states[0][0]))
        return is_equal

    def require_told_apart(self) -> None:
        """Raise AssertionError if objects were found equal whose class makes the same of all arguments."""
        for kind in {id(maker): maker for maker, _, _ in self.made}.values():
            made = [(arguments, self.ask("state", value)) for maker, arguments, value in self.made if maker is kind]
            (arguments, (name, state)), *others = made
            if (
                name in self._equal
                and {True} == {state == each for _, (_, each) in others}
                and any(arguments != other for other, _ in others)
            ):
                raise AssertionError(f"all objects of the program's {name} are alike, whatever they are made of")

    def error_class(self, names: Sequence[str]) -> type[BaseException]:
        """Return the exception class of the first name, given the names of the classes that it derives from."""
        known = getattr(builtins, names[0], None) if names else Exception
        if isinstance(known, type) and issubclass(known, BaseException):
            return known
        if names[0] not in self._errors:
            self._errors[names[0]] = type(names[0], (self.error_class(names[1:]),), {})
        return self._errors[names[0]]

    def _error(self, names: Sequence[str], text: str, *, may_stop: bool) -> BaseException:
        if names and names[0] in _NEVER_RAISED and not (may_stop and names[0] == "StopIteration"):
            return RuntimeError(f"{names[0]}: {text}")
        try:
            return self.error_class(names)(*[text] * (text != ""))
        except TypeError:
            # A class that wants more than a message.
            return RuntimeError(f"{names[0]}: {text}")

    def _use_lent(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Call a function, or continue an iterator, that was passed to the program."""
        (args, kwargs), _ = unpack(request, self._restore)
        lent = self._lent[request["lent"]]
        try:
            value = next(lent) if request["operation"] == "next" else lent(*args, **kwargs)
        except Exception as error:
            name = next(each.__name__ for each in type(error).__mro__ if hasattr(builtins, each.__name__))
            return {"raised": name, "text": str(error)}
        return pack([value], self._describe)[0]

    @staticmethod
    def _check_kinds(sent: Sequence[Any], received: list[Any]) -> None:
        """Let only containers that were passed to the program take the state that it left them in."""
        for number, (before, after) in enumerate(zip(sent, received, strict=False)):
            if after is not None and before[0] not in _CONTAINERS:
                received[number] = None
            elif after is not None and before[0] != after[0]:
                raise ValueError(f"the state of a {before[0]} came back as that of a {after[0]}")

    def _describe(self, value: Any) -> list[Any]:
        if isinstance(value, RemoteObject):
            return ["held", object.__getattribute__(value, "_number")]
        if is_builtin_class(value):
            return ["builtin", value.__name__]
        if callable(value) or hasattr(value, "__next__"):
            self._lent.append(value)
            return ["lent", len(self._lent) - 1]
        self._classes[type(value).__name__] = type(value)
        return ["object", type(value).__name__, attributes_of(value)]

    def _restore(self, kind: str, words: list[Any]) -> Any:
        match kind:
            case "held":
                return RemoteObject(self, int(words[0]))
            case "object":
                return object.__new__(self._classes[words[0]])
            case "lent":
                return self._lent[words[0]]
            case "builtin" if isinstance(getattr(builtins, words[0], None), type):
                return getattr(builtins, words[0])
            case "error":
                return self.error_class([str(name) for name in words])
            case "array":
                return array(*words)
            case "coroutine":
                return self._await(RemoteObject(self, int(words[0])))
            case "not implemented":
                return NotImplemented
        raise ValueError(f"unknown kind of value {kind!r}")

    async def _await(self, coroutine: "RemoteObject") -> Any:
        return self.ask("await", coroutine)


class RemoteObject:
    """An object in the program's process.

    makes_own: it is a class by the test's word, so that its instances are the test's own.
    is_own: the test made it, so operators and methods with any name are passed on.
    """

    __slots__ = ("_is_own", "_makes_own", "_number", "_peer")

    def __init__(self, peer: Peer, number: int, *, is_own: bool = False, makes_own: bool = False) -> None:
        for name, value in (("_peer", peer), ("_number", number), ("_is_own", is_own), ("_makes_own", makes_own)):
            object.__setattr__(self, name, value)

    def __getattr__(self, name: str) -> Any:
        if (name in _OF_DATA and not self._is_own) or (name.startswith("__") and name not in _DESCRIPTIVE):
            raise AttributeError(f"a program's object has no attribute {name!r} for tests")
        return self._peer.ask("get", self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._peer.ask("set", self, name, (value,))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        value = self._peer.ask("call", self, "", args, kwargs)
        if not self._makes_own:
            return value
        if type(value) is RemoteObject:
            self._peer.made.append((self, (args, kwargs), value))
        return _owned(value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RemoteObject) and self._peer.have_equal_states(self, other)

    def __hash__(self) -> int:
        return hash(self._number)

    def __bool__(self) -> bool:
        return self._peer.ask("truth", self) is True

    def __contains__(self, value: object) -> bool:
        if self._is_own:
            return self._special("__contains__", value) is True
        return any(each == value for each in iter(self))

    def _special(self, name: str, *args: Any) -> Any:
        try:
            return self._peer.ask("special", self, name, args)
        except AttributeError as error:
            raise TypeError(f"a program's object does not support {name}") from error

    def __iter__(self) -> Iterator[Any]:
        iterator: Iterator[Any] = self._special("__iter__")
        return iterator

    def __enter__(self) -> Any:
        return self._special("__enter__")

    def __exit__(self, *_: object) -> None:
        # Whatever it returns, an exception of the test goes on.
        self._special("__exit__", None, None, None)

    def __instancecheck__(self, value: Any) -> bool:
        return isinstance(value, RemoteObject) and self._peer.ask("is a", value, "", (self,)) is True


def _owned(value: Any) -> Any:
    if type(value) is RemoteObject:
        return RemoteObject(value._peer, value._number, is_own=True)
    return value


def _operator(name: str, *, for_own_only: bool) -> Callable[..., Any]:
    def method(self: RemoteObject, *args: Any) -> Any:
        if for_own_only and not self._is_own:
            return NotImplemented
        value = self._special(name, *args)
        return _owned(value) if for_own_only else value

    return method


_OPERATORS = "add sub mul truediv floordiv mod pow matmul and or xor lshift rshift divmod"
for _name in ["lt", "le", "gt", "ge", "setitem", *_OPERATORS.split(), *(f"r{each}" for each in _OPERATORS.split())]:
    setattr(RemoteObject, f"__{_name}__", _operator(f"__{_name}__", for_own_only=True))
for _name in ["neg", "pos", "abs", "len", "next", "getitem", "delitem", "int", "float", "str", "repr"]:
    setattr(RemoteObject, f"__{_name}__", _operator(f"__{_name}__", for_own_only=False))
