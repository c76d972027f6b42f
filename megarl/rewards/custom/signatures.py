"""Load and call reward functions written for verl, OpenRLHF or TRL: what each is given, and how its result is read."""

import inspect
import math
import symtable
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.util import decode_source
from pathlib import Path
from typing import Any

from megarl.errors import ConfigError
from megarl.host.reading import require_file
from megarl.host.user_code import mistake, run_file
from megarl.rewards.question import Question
from megarl.rewards.wire import BadReplyError, decode_reply, note
from megarl.types import Reward

RewardFunction = Callable[..., Any]


@cache
def load_function(path: Path, name: str) -> RewardFunction:
    """Load a function of a Python file; the file is executed at most once per process.

    Raises ConfigError if the file cannot be loaded, or has no such function; the message names file and line.
    """
    _require_python(path)
    file, module_name = str(path.absolute()), f"megarl_reward_{path.stem}"
    loaded = sys.modules.get(module_name)
    if loaded is None or loaded.__file__ != file:
        loaded = run_file(path, module_name)
    function = getattr(loaded, name, None)
    if not callable(function):
        raise _lacks(path, name, (each for each, value in vars(loaded).items() if inspect.isfunction(value)))
    found: RewardFunction = function
    return found


def look_for(path: Path, name: str) -> None:
    """Raise ConfigError if a file is no Python or evidently has no such function, without running anything of it."""
    _require_python(path)
    try:
        source = decode_source(path.read_bytes())
        symbols = symtable.symtable(source, str(path.absolute()), "exec").get_symbols()
    except (SyntaxError, ValueError) as error:
        raise mistake(path, error) from error
    # These may bring any name along.
    if "import *" not in source and "globals" not in source and not any(each.get_name() == name for each in symbols):
        raise _lacks(path, name, (each.get_name() for each in symbols if each.is_namespace()))


def _require_python(path: Path) -> None:
    require_file(path, "a Python file with a reward function", remedy="set its path", error=ConfigError)
    if path.suffix != ".py":
        raise ConfigError(f"{path}: expected a Python file, its name ending in .py; rename it, or set another path")


def _lacks(path: Path, name: str, others: Iterable[str]) -> ConfigError:
    public = ", ".join(each for each in others if each[0] != "_") or "none"
    return ConfigError(f"{path}: has no function {name!r}, only {public}; set its name")


def first_line(function: RewardFunction) -> int:
    """Return the line of its file in which a function begins; 1 for a callable object."""
    return function.__code__.co_firstlineno if inspect.isfunction(function) else 1


# TRL's parameter for the tokens of responses, which its functions may take instead of texts.
IDS = "completion_ids"
# Names under which TRL's data sets keep the ground truth.
_TRUTHS = ("ground_truth", "answer", "solution", "label")


class BadResultError(Exception):
    """The error of a function that returned something else than rewards; its message says what was expected."""


@dataclass(frozen=True, slots=True)
class _MetricLog:
    """TRL's `log_metric`: the numbers that a function logs in a call, by name."""

    logged: dict[str, list[float]] = field(default_factory=dict)

    def __call__(self, name: str, value: float) -> None:
        self.logged.setdefault(str(name), []).append(float(value))


@dataclass(frozen=True, slots=True)
class _ColumnLog:
    """TRL's `log_extra`: the lists that a function logs in a call, with an entry per row, by name."""

    num_rows: int
    logged: dict[str, list[object]] = field(default_factory=dict)

    def __call__(self, column: str, values: Sequence[object]) -> None:
        entries = list(values)
        if len(entries) != self.num_rows:
            raise ValueError(f"log_extra: {column} has {len(entries)} values, expected {self.num_rows}, one per row")
        self.logged[str(column)] = entries


@dataclass(frozen=True, slots=True, kw_only=True)
class Signature:
    """A convention for reward functions, recognised by a parameter that only functions of this kind have.

    takes_rows: whether parameters are lists, with an entry per row. arguments: builds keyword arguments from questions.
    results: reads the return value as one reward per question, None where the function has no opinion; raises
    BadResultError.
    """

    name: str
    parameter: str
    takes_rows: bool
    arguments: Callable[[Sequence[Question]], dict[str, object]]
    results: Callable[[object, int], list[Reward | None]]

    def bind(
        self, function: RewardFunction, rows: Sequence[Question], extra: Mapping[str, object]
    ) -> dict[str, object]:
        """Return the keyword arguments of a call, among them `extra`; TypeError if a parameter is not filled."""
        offered, signature = self.arguments(rows), inspect.signature(function)
        if not any(each.kind is each.VAR_KEYWORD for each in signature.parameters.values()):
            offered = {name: value for name, value in offered.items() if name in signature.parameters}
        try:
            signature.bind(**{**offered, **extra})
        except TypeError as error:
            raise TypeError(
                f"{error}; a call offers {', '.join(self.arguments(rows))}, and custom.arguments"
            ) from error
        return {**offered, **extra}

    def rewards(self, result: object, num_rows: int, given: Mapping[str, object]) -> list[Reward | None]:
        """Return a call's rewards with what the function logged: the means of its metrics, and its columns as notes."""
        rewards = self.results(result, num_rows)
        details, columns = dict[str, float](), dict[str, list[object]]()
        for argument in given.values():
            if isinstance(argument, _MetricLog):
                means = {name: sum(values) / len(values) for name, values in argument.logged.items()}
                details = {name: mean for name, mean in means.items() if math.isfinite(mean)}
            elif isinstance(argument, _ColumnLog):
                columns = argument.logged
        if not details and not columns:
            return rewards
        return [
            reward
            and replace(
                reward,
                details={**reward.details, **details},
                notes={**reward.notes, **{name: note(entries[row]) for name, entries in columns.items()}},
            )
            for row, reward in enumerate(rewards)
        ]


def signature_of(function: RewardFunction, path: Path, extra: Mapping[str, object]) -> Signature:
    """Recognise the convention that a function follows; `extra` are arguments that it gets besides.

    Raises ConfigError if it follows none, or requires a parameter that nothing fills.
    """
    where = f"{path}:{first_line(function)}: {getattr(function, '__name__', 'the function')}"
    parameters = inspect.signature(function).parameters
    found = next((each for each in SIGNATURES if each.parameter in parameters), None)
    if found is None and IDS in parameters:
        found = TRL
    if found is None:
        known = ", ".join(f"{each.parameter} ({each.name})" for each in SIGNATURES)
        raise ConfigError(f"{where}: got the parameters ({', '.join(parameters)}), expected one of {known}; rename one")
    if found is not TRL:  # whose parameters are columns of the data
        try:
            found.bind(function, [Question(data_source="", prompt="", response="", ground_truth="")], extra)
        except TypeError as error:
            raise ConfigError(f"{where}: {error}") from error
    return found


def _trl(rows: Sequence[Question]) -> dict[str, object]:
    """Build TRL's arguments: chats as lists of messages, or texts if a chat is unknown, and the columns of the data."""
    are_chats = all(row.messages and not row.is_text for row in rows)
    names = {name for row in rows for name in row.extra_info}
    return {
        "prompts": [[m.as_dict() for m in row.messages] if are_chats else _text(row) for row in rows],
        "completions": [
            [{"role": "assistant", "content": row.response}] if are_chats else row.response for row in rows
        ],
        IDS: [list(row.response_ids) for row in rows],
        "trainer_state": None,
        "data_source": [row.data_source for row in rows],
        **{name: [row.ground_truth if row.label is None else row.label for row in rows] for name in _TRUTHS},
        **{name: [row.extra_info.get(name) for row in rows] for name in sorted(names)},
        "log_metric": _MetricLog(),
        "log_extra": _ColumnLog(len(rows)),
    }


def _text(row: Question) -> str:
    return row.messages[0].content if row.is_text else row.prompt


def _rewards_of_trl(result: object, num_rows: int) -> list[Reward | None]:
    values = plain(result)
    if not isinstance(values, list) or len(values) != num_rows:
        raise BadResultError(f"returned {result!r:.120}, expected a list of {num_rows} numbers or None, one per row")
    rewards: list[Reward | None] = []
    for value in values:
        if value is None:
            rewards.append(None)
        elif isinstance(value, int | float) and math.isfinite(value):
            rewards.append(Reward(score=float(value), correct=value > 0))
        else:
            raise BadResultError(f"returned {value!r:.120} for a row, expected a finite number or None")
    return rewards


def _rewards_of_openrlhf(result: object, num_rows: int) -> list[Reward | None]:
    try:
        reply = decode_reply(plain(result), num_rows)
    except BadReplyError as error:
        raise BadResultError(f"returned for {num_rows} rows: {error}") from error
    return [None if value is None else reply.reward(row) for row, value in enumerate(reply.rewards)]


def _rewards_of_verl_batch(result: object, num_rows: int) -> list[Reward | None]:
    values = plain(result)
    if not isinstance(values, list) or len(values) != num_rows:
        raise BadResultError(f"returned {result!r:.120}, expected a list of {num_rows}, one number or mapping per row")
    return [reward for value in values for reward in _rewards_of_verl(value, 1)]


def _rewards_of_verl(result: Any, num_rows: int) -> list[Reward | None]:
    values = dict(result) if isinstance(result, Mapping) else {"score": result}
    numbers, notes = dict[str, float](), dict[str, object]()
    for key, value in values.items():
        # Text that looks like a number, such as an extracted answer, is not logged as one.
        with suppress(TypeError, ValueError, OverflowError):
            if not isinstance(value, str | bytes) and math.isfinite(number := float(value)):
                numbers[str(key)] = number
                continue
        notes[str(key)] = note(value)
    silent = tuple(str(key) for key, value in values.items() if value is None)
    if "score" not in numbers or "acc" in notes:
        raise BadResultError(
            f"returned {result!r:.120}, expected a finite number, or a mapping with 'score', a finite number, and, "
            "if there is 'acc', a number or a boolean for it"
        )
    score = numbers.pop("score")
    return [
        Reward(
            score=score, correct=bool(numbers.pop("acc", score > 0)), details=numbers, notes=notes, no_opinion=silent
        )
    ]


def plain(value: object) -> object:
    """Convert tensors and arrays to lists; a tensor or array without dimensions becomes a list of one number."""
    if isinstance(value, Mapping):
        return {name: plain(entry) for name, entry in value.items()}
    if hasattr(value, "tolist"):
        value = value.tolist()
        return value if isinstance(value, list) else [value]
    if isinstance(value, list | tuple):
        return [each.item() if hasattr(each, "item") else each for each in value]
    return value


VERL = Signature(
    name="verl",
    parameter="solution_str",
    takes_rows=False,
    arguments=lambda rows: {
        "data_source": rows[0].data_source,
        "solution_str": rows[0].response,
        "ground_truth": rows[0].ground_truth,
        "extra_info": rows[0].extra_info,
    },
    results=_rewards_of_verl,
)
VERL_BATCH = Signature(
    name="verl's batch manager",
    parameter="solution_strs",
    takes_rows=True,
    arguments=lambda rows: {
        "data_sources": [row.data_source for row in rows],
        "solution_strs": [row.response for row in rows],
        "ground_truths": [row.ground_truth for row in rows],
        "extra_infos": [row.extra_info for row in rows],
    },
    results=_rewards_of_verl_batch,
)
OPENRLHF = Signature(
    name="OpenRLHF",
    parameter="queries",
    takes_rows=True,
    arguments=lambda rows: {
        "queries": [row.prompt + row.response for row in rows],
        "prompts": [row.prompt for row in rows],
        "labels": [row.ground_truth for row in rows],
        "data_source": [row.data_source for row in rows],
        "extra_info": [row.extra_info for row in rows],
    },
    results=_rewards_of_openrlhf,
)
TRL = Signature(name="TRL", parameter="completions", takes_rows=True, arguments=_trl, results=_rewards_of_trl)
SIGNATURES = (VERL, VERL_BATCH, OPENRLHF, TRL)
