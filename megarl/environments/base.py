"""Define what an environment is: an object per sample that replies to the policy's turns, and ends the conversation."""

import asyncio
import importlib.util
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import wait
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, TypeAlias

from megarl.config.environments import EnvironmentConfig, EnvironmentEntry
from megarl.environments.calls import THREADS
from megarl.errors import ConfigError
from megarl.host.child_environment import child_environment
from megarl.host.clock import MOST_S, awake_s
from megarl.host.masking import masked
from megarl.host.reading import require_file
from megarl.host.user_code import run_file, told
from megarl.registry import Registry, unknown_name
from megarl.types import Message, Prompt

# Characters of all messages of a reply. No conversation has room for this many, and to tokenise megabytes would hold up
# all other samples of the process.
MOST_REPLY_CHARS = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """A turn of the policy, the first has number 0; `text` has no special tokens.

    is_cut: whether a limit ended the turn, so that the policy had not finished it. num_tokens: those of the turn.
    num_before: the tokens that the policy read before it.
    """

    text: str
    turn: int
    is_cut: bool = False
    num_tokens: int = 0
    num_before: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """An environment's reply to a turn: messages for the policy to read, and whether the conversation ends here.

    Messages are text, whatever they spell: the policy reads `< |im_end|>` for `<|im_end|>`, see
    `InterTurnTokens.plain`; their images stand where they have `<image>`. They follow the turn, or an earlier one with
    the number `after_turn`, which then has a further branch. context: instead of `messages`, all that the policy reads
    next, from the first message on. reward: the reward of the turn; of several tries, that of `after_turn`, or else of
    the last. rewards: those of any turns so far, by their numbers; they add up with what these turns have. num_calls:
    the tools that the turn called. details: further findings; numbers among them become metrics `environment/detail/…`,
    as means; later replies override earlier ones of the same name. warnings: the indices of those messages that the
    policy does not learn to predict (`algo.echo_coef`), as they say nothing of the environment.
    """

    messages: tuple[Message, ...] = ()
    after_turn: int | None = None
    context: tuple[Message, ...] = ()
    done: bool = False
    reward: float = 0.0
    rewards: Mapping[int, float] = field(default_factory=dict)
    num_calls: int = 0
    details: Mapping[str, object] = field(default_factory=dict)
    warnings: Collection[int] = ()


def short(messages: Sequence[Message]) -> Sequence[Message]:
    """Return the messages of an environment; ValueError if they are too long."""
    num_chars = sum(len(message.content) for message in messages if isinstance(message.content, str))
    if num_chars > MOST_REPLY_CHARS:
        raise ValueError(f"the reply has {num_chars} characters, expected at most {MOST_REPLY_CHARS}; shorten it")
    return messages


@dataclass(frozen=True, slots=True, kw_only=True)
class SideRequest:
    """A context that the policy answers at the same time as its next turn, by a turn of its own.

    messages, after_turn, context: as those of a reply. tools, max_turn_tokens, stop, num_tries, trains: as those of an
    environment.
    """

    messages: tuple[Message, ...] = ()
    after_turn: int | None = None
    context: tuple[Message, ...] = ()
    tools: Sequence[Mapping[str, object]] = ()
    max_turn_tokens: int | None = None
    stop: Sequence[str] = ()
    num_tries: int = 1
    trains: bool = True


class Environment:
    """The base class of environments. Each sample has an object of its own, so it may keep state between turns.

    An object is made with the entry's `arguments`. Its coroutines share a process with thousands of others: they await
    what takes long, and hand work that cannot be awaited to `asyncio.to_thread`. Whatever they raise costs the sample,
    which then does not train. Prompts give the row of the data (`ground_truth`, `extra_info`).
    """

    # Schemas of functions that the chat template writes into the prompt, in OpenAI's form.
    tools: Sequence[Mapping[str, object]] = ()
    # Whether `start` returns the whole prompt, instead of what follows the messages of the row.
    owns_prompt: ClassVar[bool] = False
    # Environment variables for the processes that it starts: the usual ones and those of `environment.pass_env`. They
    # are there once it is made.
    process_environment: Mapping[str, str] = {}
    # Limit of the policy's next turn, besides those of the configuration. It may change with every reply.
    max_turn_tokens: int | None = None
    # Texts besides `rollout.stop` with which the policy's next turn ends. They may change with every reply.
    stop: Sequence[str] = ()
    # How many times the policy writes its next turn, side by side and each by itself; it may change with every reply.
    # `choose` gets several, `reply` one.
    num_tries: int = 1
    # Whether the policy's next turn trains; it may change with every reply.
    trains: bool = True
    # Contexts that the policy answers at the same time as it writes its next turn; `choose` gets all of these turns, in
    # order. It may change with every reply.
    beside: Sequence[SideRequest] = ()
    # They are there once a worker has the conversation. `read_image` keeps an image, given its bytes or a data URL, and
    # returns its digest; None: the run reads texts alone.
    count_tokens: "TokenCounter | None" = None
    read_image: "Callable[[object], str] | None" = None

    async def start(self, prompt: Prompt) -> Sequence[Message]:
        """Begin a conversation; return messages that follow those of the prompt, which the policy answers first."""
        return ()

    async def reply(self, action: Action) -> Reply:
        """Reply to a turn of the policy."""
        raise NotImplementedError

    async def choose(self, actions: Sequence[Action]) -> Reply:
        """Reply to the tries of a turn; `after_turn` names the one from which the conversation goes on.

        A later reply may go on from any other of them.
        """
        raise NotImplementedError

    async def resume(self, prompt: Prompt, actions: Sequence[Action]) -> bool:
        """Bring a new object to where an earlier one was after these actions; return whether that is possible.

        Called instead of `start` when a conversation goes on after a resume, or after the death of its host. Where it
        is not possible, which is the default, the conversation begins again.
        """
        return False

    async def close(self) -> None:
        """Free what the conversation holds; called once, whatever happened before."""


# Counts the tokens of messages, with these tools, as the policy reads them.
TokenCounter: TypeAlias = Callable[[Sequence[Message], Sequence[Mapping[str, object]]], int]
EnvironmentFactory: TypeAlias = Callable[..., Environment]
ENVIRONMENTS: Registry[EnvironmentFactory] = Registry("environment", key="environment.entries.*.type")
# Environments of packages, as PACKAGE:NAME; they are called with the name before their arguments.
PACKAGES: Registry[EnvironmentFactory] = Registry("package", key="environment.entries.*.type")


def open_environments(cfg: EnvironmentConfig, names: Sequence[str]) -> "dict[str, Maker]":
    """Return, for each name that rows use, what makes a new environment; each is tried once.

    Raises ConfigError for a name that is neither in `environment.entries` nor built in, for MODULE:CLASS unless it is
    the configuration's default, for arguments that the class does not take, for a class of which none is made in time,
    and for variables of `environment.pass_env` that are not set.
    """
    found: dict[str, Maker] = {}
    variables = child_environment(cfg.pass_env, key="environment.pass_env")
    for name in sorted(names):
        key, named = _key_of(cfg, name), type_of(cfg, name)
        entry = cfg.entries.get(name) or EnvironmentEntry(type=named)
        if ":" in named and name not in (*cfg.entries, cfg.default):
            raise ConfigError(
                f"environment {name!r}: rows name code, which only the configuration may; if you trust it, add it to "
                "environment.entries under a name of yours, and give the rows that name"
            )
        package, _, rest = named.partition(":")
        if package in PACKAGES:
            factory: EnvironmentFactory = partial(PACKAGES.get(package), rest)
        else:
            factory = load_object(named, key) if ":" in named else ENVIRONMENTS.get(named)
        found[name] = Maker(
            factory=factory,
            arguments=entry.arguments,
            process_environment=variables,
            key=key,
            timeout_s=cfg.reply_timeout_s,
        )
        found[name].made_in_time()
    return found


def type_of(cfg: EnvironmentConfig, name: str) -> str:
    """Return the type of an environment: a name in ENVIRONMENTS, a package's, or code. Raises ConfigError for any
    other.
    """
    key, named = _key_of(cfg, name), cfg.entries[name].type if name in cfg.entries else name
    package, colon, rest = named.partition(":")
    if named in ENVIRONMENTS or (package in PACKAGES and rest):
        return named
    if not colon or package in PACKAGES:
        known = [*ENVIRONMENTS, *(f"{each}:NAME" for each in PACKAGES)]
        raise unknown_name("environment", named, [*known, *(() if name in cfg.entries else cfg.entries)], key=key)
    where = named.rpartition(":")[0]
    if where.endswith(".py"):
        require_file(Path(where), "a Python file with an environment", remedy=f"correct {key}", error=ConfigError)
    elif importlib.util.find_spec(root := where.partition(".")[0]) is None:
        raise ConfigError(f"{key}: got {named}, but there is no module {root}; install it, or name FILE.py:NAME")
    return named


def _key_of(cfg: EnvironmentConfig, name: str) -> str:
    """Return the setting, or the column, that says what an environment is."""
    if name in cfg.entries:
        return f"environment.entries.{name}.type"
    return "environment.default" if name == cfg.default else cfg.key


def is_rehearsed(cfg: EnvironmentConfig, name: str) -> bool:
    """Return whether an episode is tried before a run: of those that the configuration describes, and allows it."""
    entry = cfg.entries.get(name)
    return ":" in name if entry is None else entry.rehearse


def tools_of(cfg: EnvironmentConfig, name: str) -> Sequence[Mapping[str, object]]:
    """Return the schemas of an environment's tools. Raises ConfigError as `open_environments` does."""
    return open_environments(cfg, [name])[name].made_in_time().tools


@dataclass(frozen=True, slots=True, kw_only=True)
class Maker:
    """Makes environments of one class with the same arguments. key: the setting that names the class."""

    factory: EnvironmentFactory
    arguments: Mapping[str, object]
    process_environment: Mapping[str, str]
    key: str
    timeout_s: float

    def __call__(self) -> Environment:
        try:
            made = self.factory(**self.arguments)
        except TypeError as error:
            entry, ends_so, _ = self.key.rpartition(".type")
            where = f"{entry}.arguments" if ends_so else f"{self.key} as an entry of environment.entries, by arguments"
            raise ConfigError(f"{where}: got {masked(self.arguments)}; {error}") from error
        missing = [name for name in ("start", "reply", "resume", "close") if not hasattr(made, name)]
        if missing:
            raise ConfigError(
                f"{self.key}: {type(made).__name__} has no {missing[0]}; derive it from megarl.environments.Environment"
            )
        if isinstance(made, Environment):
            made.process_environment = self.process_environment
        return made

    def made_in_time(self) -> Environment:
        """Make an environment as hosts do, where an event loop runs, but wait for it only `timeout_s` seconds.

        Raises ConfigError if that is too short, and if the class does not take the arguments.
        """

        async def make() -> Environment:
            return self()

        pending = THREADS.submit(lambda: asyncio.run(make()))
        deadline = awake_s() + self.timeout_s
        while not pending.done() and (left_s := deadline - awake_s()) > 0:
            wait([pending], min(MOST_S, left_s))
        if not pending.done():
            pending.cancel()
            raise ConfigError(
                f"{self.key}: no environment was made within {self.timeout_s:g} s; look into what its constructor "
                "waits for, or raise environment.reply_timeout_s"
            )
        return pending.result()


def load_object(spec: str, key: str) -> Any:
    """Load a class or function by MODULE:NAME or FILE.py:NAME; ConfigError, which names `key`, if there is none.

    A file is executed at most once per process.
    """
    where, _, name = spec.rpartition(":")
    try:
        if where.endswith(".py"):
            path, module_name = Path(where), f"megarl_environment_{Path(where).stem}"
            require_file(path, "a Python file with an environment", remedy="set its path", error=ConfigError)
            module = sys.modules.get(module_name)
            if module is None or module.__file__ != str(path.absolute()):
                module = run_file(path, module_name)
        else:
            module = importlib.import_module(where)
    except ConfigError as error:
        raise ConfigError(f"{key}: {error}") from error
    except (Exception, SystemExit) as error:  # the user's code may raise anything
        raise ConfigError(f"{key}: {where} does not load: {told(error)}") from error
    if not hasattr(module, name):
        public = ", ".join(sorted(each for each in vars(module) if not each.startswith("_"))) or "nothing"
        raise ConfigError(f"{key}: {where} has no {name!r}; name one of what it has: {public}")
    return getattr(module, name)
