"""Call users' code in the process of a trial, which `rehearsal.try_out` starts with the trial as its input."""

import asyncio
import faulthandler
import functools
import inspect
import json
import os
import pickle
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import psutil

from megarl.config.part_settings import chosen_by, use_plugins_of, value_of
from megarl.config.plugins import registrations
from megarl.errors import RehearsalError
from megarl.host.clock import AwakeLoop
from megarl.host.user_code import is_users_file, place_of, told
from megarl.types import Message, Prompt

if TYPE_CHECKING:
    from megarl.environments.base import Maker
    from megarl.environments.rehearsal import Schemas
    from megarl.train.rehearsal import Trial


# How long to wait at the end for processes that users' code has left.
_FORKED_S = 0.5
# For single calls, where no configuration says it.
_LIMIT_S = 30.0

# A function or a class.
UsersObject: TypeAlias = Callable[..., Any]


class Teller:
    """Tells the process that asked for the trial what is tried, and what was found."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor, self._pid = descriptor, os.getpid()
        self._about = ""

    def tell(self, **found: object) -> None:
        os.write(self._descriptor, json.dumps(found).encode() + b"\n")

    @contextmanager
    def trying(self, about: str, function: object = None) -> Iterator[None]:
        """Within this context, users' code is called; whatever it raises is told as its mistake."""
        place = defined(function)
        self.tell(about=f"{place}: {about}" if place else about)
        try:
            yield
        except BaseException as error:
            if os.getpid() == self._pid:
                own = type(error).__module__.startswith("megarl.") or not place_of(error)
                where = place_of(error) or place
                said = str(error) if own else told(error)
                if place and said.startswith(place.rpartition(":")[0]):
                    where, _, said = said.partition(": ")
                self.tell(mistake=said if own and not place else f"{where}: {about}: {said}")
        if os.getpid() != self._pid:
            where = f"{place}: {about}" if place else about
            self.tell(mistake=f"{where}: a process that it forked returns as well; end that by os._exit")
            os._exit(0)


def defined(function: object) -> str:
    """Return where a user's function begins, as FILE:LINE; empty if that is unknown."""
    for inner in (function, getattr(type(function), "__call__", None)):  # noqa: B004 - not whether, but what is called
        while isinstance(inner, functools.partial):
            inner = inner.func
        code = getattr(inspect.unwrap(inner) if callable(inner) else None, "__code__", None)
        if code is not None:
            return f"{code.co_filename}:{code.co_firstlineno}"
    return ""


def try_parts(trial: "Trial", teller: Teller) -> None:
    """Call the parts of algorithms that plugins register: those that the configuration chooses, or every one."""
    with teller.trying(", ".join(trial.config.algo.plugins) or "algo.plugins"):
        use_plugins_of(trial.config)
    if not (registered := registrations()):
        return
    from megarl.algos.rehearsal import REHEARSALS, made_up, rehearse_part
    from megarl.config.load import with_overrides

    for each in registered:
        chosen = [name for name in each.names if name in chosen_by(trial.config, each.registry.key)]
        if not chosen and not trial.every:
            continue
        name = (chosen or each.names)[0]
        shown = f" with {each.own.value}" if each.own else ""
        with teller.trying(f"{each.registry.kind} {name!r}{shown}", each.target):
            config = trial.config
            if not chosen and each.registry in REHEARSALS:
                value = f"[{name}]" if isinstance(value_of(config, each.registry.key), tuple) else name
                config = with_overrides(config, [f"{each.registry.key}={value}"])
            rehearse_part(
                each.registry,
                each.entry,
                made_up(config.algo, config.train_preference, num_samples=config.rollout.num_samples),
            )


def try_functions(trial: "Trial", teller: Teller) -> None:
    """Load reward functions and look at their parameters; what they answer to the run's prompts is looked at later."""
    from megarl.rewards.custom.signatures import load_function, signature_of

    for name, each in trial.config.rewards.custom.all_functions().items():
        with teller.trying(f"rewards.custom: the function {name}"):
            signature_of(load_function(path := Path(each.path), each.name), path, each.arguments)


def try_episodes(trial: "Trial", teller: Teller) -> None:
    """Play an episode with each environment."""
    from megarl.environments.base import Maker, open_environments

    cfg = trial.config.environment
    for prompt in trial.prompts:
        makers: dict[str, Maker] = {}
        with teller.trying(f"environment {prompt.environment!r}"):
            makers = open_environments(cfg, [prompt.environment])
        for name, maker in makers.items():
            with teller.trying(f"environment {name!r}", getattr(maker.factory, "reply", maker.factory)):
                tools = _play(trial, maker, prompt, max_turns=cfg.max_turns, reply_s=cfg.reply_timeout_s)
                teller.tell(tools={name: json.loads(json.dumps(list(tools), default=str))})


def try_file(trial: "Trial", teller: Teller) -> None:
    """Try the reward functions, agents and environments of a plugin's file, or the one that the trial names."""
    stem = Path(trial.file).stem
    module = sys.modules.get(f"megarl_plugin_{stem}")
    if not trial.file or module is None:
        return
    # The file runs once, whoever loads it.
    sys.modules |= {f"megarl_reward_{stem}": module, f"megarl_environment_{stem}": module}
    parts = [each.target for each in registrations()]
    wanted = [trial.name] if trial.name else [name for name in vars(module) if not name.startswith("_")]
    found = 0
    for name in wanted:
        value = getattr(module, name, None)
        kind = next((each for each in OBJECTS if value not in parts and each.is_one(value)), None)
        if value is None or kind is None or (not trial.name and getattr(value, "__module__", "") != module.__name__):
            continue
        found += 1
        with teller.trying(f"{kind.title} {name!r}", getattr(value, "reply", value)):
            kind.call(trial, teller, name, value)
    if not found and (trial.name or not parts):
        teller.tell(mistake=f"{trial.file}: {trial.name or 'it'} {_EXPECTED}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectKind:
    """A kind of what users write into files: what is one, and how it is tried."""

    title: str
    is_one: Callable[[object], bool]
    call: Callable[["Trial", Teller, str, UsersObject], None]


def _parameters(value: object) -> frozenset[str]:
    return frozenset(inspect.signature(value).parameters) if inspect.isroutine(value) else frozenset()


def _is_reward(value: object) -> bool:
    from megarl.rewards.custom.signatures import IDS, SIGNATURES

    return not _parameters(value).isdisjoint([IDS, *(each.parameter for each in SIGNATURES)])


def _call_reward(trial: "Trial", teller: Teller, name: str, function: UsersObject) -> None:
    from megarl.rewards.custom.call import call_function
    from megarl.rewards.custom.functions import FAILURES
    from megarl.rewards.custom.signatures import signature_of
    from megarl.rewards.question import Question

    together = signature_of(function, Path(trial.file), {}).takes_rows
    prompt = made_up_prompt("")
    rows = [
        Question(
            data_source=prompt.data_source,
            prompt=prompt.messages[0].content,
            response=response,
            ground_truth=prompt.ground_truth,
            messages=prompt.messages,
        )
        for response in ("The answer is 1.", "1", "The answer is 2.", "")
    ]
    verdicts = call_function(
        "", "", {}, rows=rows, path=trial.file, name=name, arguments={}, together=together, limit_s=_LIMIT_S
    )
    if len(given := {verdict.reward and verdict.reward.score for verdict in verdicts}) == 1:
        what = f"is flat: it gave {given.pop()} for right and wrong answers alike; check that it compares them"
        teller.tell(warning=f"{defined(function)}: reward function {name!r} {what}")
    for verdict in verdicts:
        if verdict.outcome in FAILURES:
            raise RehearsalError(f"{verdict.reason}; correct it")


def _play(trial: "Trial", maker: "Maker", prompt: Prompt, *, max_turns: int, reply_s: float) -> "Schemas":
    """Play an episode; what it shows is kept apart, and opened, in a run that reads images."""
    from megarl.data.images import DataImages
    from megarl.environments.images import ReplyImages
    from megarl.environments.rehearsal import play

    form = trial.config.data
    images = None if form.image_key is None else DataImages.unexpanded(trial.config.model.path, form)
    with nullcontext() if images is None else images.kept_apart(), asyncio.Runner(loop_factory=AwakeLoop) as runner:
        return runner.run(play(maker, prompt, max_turns=max_turns, reply_s=reply_s, images=ReplyImages(images)))


def _play_alone(trial: "Trial", factory: UsersObject, key: str) -> None:
    from megarl.environments.base import Maker

    maker = Maker(factory=factory, arguments={}, process_environment=dict(os.environ), key=key, timeout_s=_LIMIT_S)
    _play(trial, maker, made_up_prompt(key), max_turns=8, reply_s=_LIMIT_S)


def _play_agent(trial: "Trial", teller: Teller, name: str, agent: UsersObject) -> None:
    from megarl.environments.agent import AgentEnvironment

    _play_alone(trial, functools.partial(AgentEnvironment, agent=agent), name)


def made_up_prompt(environment: str) -> Prompt:
    """Return a made-up row of data: a question with the answer 1."""
    return Prompt(
        uid="made-up",
        token_ids=(),
        data_source="made-up",
        ground_truth="1",
        messages=(Message(role="user", content="What is 2 - 1?"),),
        environment=environment,
    )


# In this order: the first that fits.
OBJECTS = (
    ObjectKind(title="reward function", is_one=_is_reward, call=_call_reward),
    ObjectKind(title="agent", is_one=lambda value: "base_url" in _parameters(value), call=_play_agent),
    ObjectKind(
        title="environment",
        is_one=lambda value: isinstance(value, type) and hasattr(value, "reply"),
        call=lambda trial, teller, name, value: _play_alone(trial, value, name),
    ),
)
_EXPECTED = (
    "is neither registered as a part of an algorithm, nor a reward function (with a parameter queries, solution_str or "
    "completions), an agent (base_url) or an environment (a class with reply); add one, or name another file"
)


KINDS: tuple[Callable[["Trial", Teller], None], ...] = (try_parts, try_functions, try_episodes, try_file)


def users_files() -> dict[str, str]:
    """Return the SHA-256 of each file that was imported and is neither megarl's, Python's nor a package's."""
    files = {str(getattr(module, "__file__", "")) for module in list(sys.modules.values())}
    own = sorted(file for file in files if os.path.isabs(file) and is_users_file(file) and os.path.isfile(file))
    return {file: sha256(Path(file).read_bytes()).hexdigest() for file in own}


def main() -> None:
    """Try what the trial asks for, within its time limit."""
    teller = Teller(int(sys.argv[1]))
    # Modules are found as the command that asks finds them.
    paths, trial = pickle.load(sys.stdin.buffer)
    sys.path[:] = paths
    if trial.config.algo.plugins or trial.file:
        import megarl.algos.rehearsal  # noqa: F401 - so that its import does not count

    # The output of users' code may be caught.
    errors = os.fdopen(os.dup(sys.stderr.fileno()), "w", encoding="utf-8")
    faulthandler.enable(errors)
    for kind in KINDS:
        kind(trial, teller)
    if children := psutil.Process().children():
        # One that users' code has forked may be on its way to tell so.
        psutil.wait_procs(children, timeout=_FORKED_S)
    teller.tell(files=users_files())
    teller.tell(is_done=True)
    sys.stdout.flush()
    # Threads that users' code has left would be waited for.
    os._exit(0)
