"""Load reward functions with verl's or OpenRLHF's signature from a user's Python file."""

import contextlib
import importlib.util
import inspect
import json
import math
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any

from megarl.errors import ConfigError, RunError
from megarl.rewards.scorers import Scorer
from megarl.rewards.wire import BadReplyError, decode_reply
from megarl.types import Reward

# Parameters of verl's reward functions, and of OpenRLHF's.
PARAMETERS = ("data_source", "solution_str", "ground_truth", "extra_info")
BATCH_PARAMETERS = ("queries", "prompts", "labels")

# Longest note that is kept, since a worker's reply is limited and rollout files are meant for reading.
MAX_NOTE_CHARS = 16_384

RewardFunction = Callable[..., Any]


def judge_by_file(
    response: str,
    ground_truth: str,
    extra_info: Mapping[str, Any],
    *,
    path: str,
    name: str,
    data_source: str,
    prompt: str,
) -> Reward:
    """Score a response by a function of a user's file. Workers of the verifier pool import this function by name."""
    return load_reward_function(path, name, data_source=data_source, prompt=prompt)(response, ground_truth, extra_info)


def load_reward_function(
    path: str | Path, name: str = "compute_score", *, data_source: str, prompt: str = ""
) -> Scorer:
    """Load a function of a Python file as a scorer of responses to `prompt`.

    verl's `name(data_source, solution_str, ground_truth, extra_info)` returns a number, or a mapping with `score`,
    optionally `acc` (whether the answer is right; else score > 0), and further entries: finite numbers are logged,
    others are kept in the rollout files. OpenRLHF's `name(queries, prompts, labels, **kwargs)` is called with lists of
    one entry and returns {"rewards": …, "scores": …, "extra_logs": {…}}; "scores" and "extra_logs" may be missing.

    Raises:
        ConfigError: the file cannot be loaded, or has no such function; the message names file and line.
        RunError: a call of the scorer fails or returns something else; the message names file and line too.
    """
    path = Path(path)
    function = load_function(path, name)
    parameters = inspect.signature(function).parameters
    if set(BATCH_PARAMETERS) <= parameters.keys():
        return partial(score_batched, function=function, path=path, data_source=data_source, prompt=prompt)
    try:
        inspect.signature(function).bind(**dict.fromkeys(PARAMETERS))
    except TypeError as error:
        line = inspect.getsourcelines(function)[1] if inspect.isfunction(function) else 1
        expected = f"({', '.join(PARAMETERS)}) or ({', '.join(BATCH_PARAMETERS)}, **kwargs)"
        raise ConfigError(f"{path}:{line}: {name}: {error}; expected {expected}") from error
    return partial(score_custom, function=function, path=path, data_source=data_source)


@cache
def load_function(path: Path, name: str) -> RewardFunction:
    """Load a function of a Python file; the file is executed at most once per process."""
    if not path.is_file():
        raise ConfigError(f"{path}: no such file; expected a Python file with a reward function")
    spec = importlib.util.spec_from_file_location(f"megarl_reward_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{path}: expected a Python file, its name ending in .py")
    module = importlib.util.module_from_spec(spec)
    # Dataclasses and pickle look modules up by name.
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    except SyntaxError as error:
        raise ConfigError(f"{path}:{error.lineno}: {error.msg}") from error
    except Exception as error:  # the user's code may raise anything
        raise ConfigError(f"{path}:{_line(error, path)}: {type(error).__name__}: {error}") from error
    function = getattr(module, name, None)
    if not callable(function):
        raise ConfigError(f"{path}: has no function {name!r}; expected def {name}({', '.join(PARAMETERS)})")
    loaded: RewardFunction = function
    return loaded


@contextlib.contextmanager
def _naming_the_line(path: Path) -> Iterator[None]:
    """Turn an error inside this context, from the user's function, into a RunError that names the file and the line."""
    try:
        yield
    except Exception as error:  # the user's code may raise anything
        raise RunError(f"{path}:{_line(error, path)}: {type(error).__name__}: {error}") from error


def _line(error: Exception, path: Path) -> int:
    """Return the last line of the user's file that an error passed through, or 1 if it passed through none."""
    frames = traceback.extract_tb(error.__traceback__)
    return next((frame.lineno or 1 for frame in reversed(frames) if Path(frame.filename) == path), 1)


def score_batched(
    response: str,
    ground_truth: str,
    extra_info: Mapping[str, Any],
    *,
    function: RewardFunction,
    path: Path,
    data_source: str,
    prompt: str,
) -> Reward:
    """Score a response by a function with OpenRLHF's signature, which is called with lists of one entry each."""
    # Functions that take no further keywords are given none.
    takes_others = any(p.kind is p.VAR_KEYWORD for p in inspect.signature(function).parameters.values())
    others = {"data_source": [data_source], "extra_info": [extra_info]} if takes_others else {}
    with _naming_the_line(path):
        result = function(queries=[prompt + response], prompts=[prompt], labels=[ground_truth], **others)
    try:
        return decode_reply(_plain(result), 1).reward(0)
    except BadReplyError as error:
        raise RunError(f"{path}: the reward function returned for one row: {error}") from error


def _plain(value: Any) -> Any:
    """Convert tensors and arrays to lists; a tensor or array without dimensions becomes a list of one number."""
    if isinstance(value, Mapping):
        return {name: _plain(entry) for name, entry in value.items()}
    if hasattr(value, "tolist"):
        value = value.tolist()
        return value if isinstance(value, list) else [value]
    return value


def score_custom(
    response: str,
    ground_truth: str,
    extra_info: Mapping[str, Any],
    *,
    function: RewardFunction,
    path: Path,
    data_source: str,
) -> Reward:
    """Score a response by a function with verl's signature."""
    with _naming_the_line(path):
        result = function(
            data_source=data_source, solution_str=response, ground_truth=ground_truth, extra_info=extra_info
        )
    values = dict(result) if isinstance(result, Mapping) else {"score": result}
    numbers, notes = dict[str, float](), dict[str, Any]()
    for key, value in values.items():
        # Text that looks like a number, such as an extracted answer, is not logged as one.
        with contextlib.suppress(TypeError, ValueError, OverflowError):
            if not isinstance(value, str | bytes) and math.isfinite(number := float(value)):
                numbers[str(key)] = number
                continue
        notes[str(key)] = _note(value)
    if "score" not in numbers or "acc" in notes:
        raise RunError(
            f"{path}:{function.__code__.co_firstlineno if inspect.isfunction(function) else 1}: returned "
            f"{str(result)[:120]}, expected a finite number, or a mapping with 'score', a finite number, and, if there "
            "is 'acc', a number or a boolean for it"
        )
    score = numbers.pop("score")
    return Reward(score=score, correct=bool(numbers.pop("acc", score > 0)), details=numbers, notes=notes)


def _note(value: Any) -> Any:
    """Convert a value to JSON types, arrays to lists. A value that is too long, or that JSON cannot express, becomes
    text.
    """
    try:
        text = json.dumps(value, allow_nan=False, default=lambda other: getattr(other, "tolist", other.__str__)())
    except (TypeError, ValueError):
        text = json.dumps(str(value))
    return json.loads(text) if len(text) <= MAX_NOTE_CHARS else text[:MAX_NOTE_CHARS]
