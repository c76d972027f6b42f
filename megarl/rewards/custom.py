"""Reward functions from a file of the user's."""

import importlib.util
import inspect
import math
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from types import ModuleType
from typing import Any

from megarl.errors import ConfigError, RunError
from megarl.rewards.registry import Scorer
from megarl.rewards.reward_func import PARAMETERS as BATCH_PARAMETERS
from megarl.rewards.reward_func import call_reward_func, is_reward_func, reward_of_result
from megarl.types import Reward

PARAMETERS = ("data_source", "solution_str", "ground_truth", "extra_info")

RewardFunction = Callable[..., Any]


def load_reward_function(
    path: str | Path, name: str = "compute_score", *, data_source: str, prompt: str = ""
) -> Scorer:
    """A function of a Python file, as a scorer of responses to `prompt`.

    verl's `name(data_source, solution_str, ground_truth, extra_info)` returns a number, or a mapping with `score`, if
    it likes `acc` (whether the answer is right; else score > 0), and further numbers for the metrics. OpenRLHF's
    `name(queries, prompts, labels, **kwargs)` is called with lists of one entry (see `rewards.reward_func`).
    ConfigError names file and line if the file cannot be loaded; RunError does so when a call fails or returns
    something else.
    """
    path = Path(path)
    function = load_function(path, name)
    if is_reward_func(function):
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
    """The function of this name; the file is executed once in a process."""
    function = getattr(_load(path), name, None)
    if not callable(function):
        raise ConfigError(f"{path}: has no function {name!r}; expected def {name}({', '.join(PARAMETERS)})")
    return function


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
    """The reward that OpenRLHF's kind of function returns."""
    others = {"data_source": data_source, "extra_info": extra_info}
    with _naming_the_line(path):
        result = call_reward_func(function, prompt=prompt, response=response, ground_truth=ground_truth, others=others)
    return reward_of_result(result, path)


@contextmanager
def _naming_the_line(path: Path) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # the user's code may raise anything
        raise RunError(f"{path}:{_line(error, path)}: {type(error).__name__}: {error}") from error


def score_custom(
    response: str,
    ground_truth: str,
    extra_info: Mapping[str, Any],
    *,
    function: RewardFunction,
    path: Path,
    data_source: str,
) -> Reward:
    """The reward that verl's kind of function returns."""
    with _naming_the_line(path):
        result = function(
            data_source=data_source, solution_str=response, ground_truth=ground_truth, extra_info=extra_info
        )
    values = dict(result) if isinstance(result, Mapping) else {"score": result}
    unusable = [key for key, value in values.items() if not _is_finite(value)]
    if "score" not in values or unusable:
        raise RunError(
            f"{path}:{function.__code__.co_firstlineno if inspect.isfunction(function) else 1}: returned "
            f"{str(result)[:120]}, expected a finite number, or finite numbers by name with 'score' among them"
        )
    score = float(values.pop("score"))
    correct = bool(values.pop("acc", score > 0))
    return Reward(score=score, correct=correct, details={key: float(value) for key, value in values.items()})


def _load(path: Path) -> ModuleType:
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
    return module


def _line(error: Exception, path: Path) -> int:
    """The line of the file at which the error arose, or which called what raised it; 1 if it is not there."""
    frames = traceback.extract_tb(error.__traceback__)
    return next((frame.lineno or 1 for frame in reversed(frames) if Path(frame.filename) == path), 1)


def _is_finite(value: Any) -> bool:
    try:
        return math.isfinite(float(value))
    except (TypeError, ValueError):
        return False
