"""Preference pairs of a built-in task: a right answer and a wrong one that looks like it."""

import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import pyarrow as pa
import pyarrow.parquet as pq

from megarl.data.tasks.base import LevelMix, Problem, Task, check_levels, draw_problem
from megarl.data.tasks.generate import held_out_problems, split_rng
from megarl.errors import ConfigError
from megarl.types import Reward

# Arguments: data source, answer, ground truth and further information; `megarl.rewards.score` is one.
Judge: TypeAlias = Callable[[str, str, str, Mapping[str, Any]], Reward]

_PAIR = pa.schema([(name, pa.string()) for name in ("prompt", "chosen", "rejected", "data_source")])


@dataclass(frozen=True, slots=True, kw_only=True)
class PreferenceConfig:
    """How many pairs of each file, and from which levels (None: those of the task's demonstrations).

    Right answers are worked out. Of the wrong ones `cheap_frac` are cheap, or near the right one where the cheap one is
    right, and the rest are worked out too, with slips: what tells these from right ones is correctness alone.
    """

    seed: int = 0
    num_train: int = 65536
    num_val: int = 400
    mix: LevelMix | None = None
    cheap_frac: float = 0.3

    def __post_init__(self) -> None:
        for name in ("num_train", "num_val"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}: got {getattr(self, name)}, expected >= 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class PreferenceFiles:
    """Where the pairs of a task lie in a directory."""

    root: Path

    @property
    def train(self) -> Path:
        return self.root / "preferences.parquet"

    @property
    def val(self) -> Path:
        return self.root / "preferences-val.parquet"


def generate_preferences(task: Task, out_dir: str | Path, config: PreferenceConfig, judge: Judge) -> PreferenceFiles:
    """Write preferences.parquet, and preferences-val.parquet of distinct held-out problems.

    `judge` tells whether an answer that is meant to be wrong happens to be right. Raises ConfigError for levels that
    the task lacks, and if it has fewer than `num_val` distinct held-out problems.
    """
    mix = task.sft_mix if config.mix is None else config.mix
    check_levels(task, mix)
    files = PreferenceFiles(root=Path(out_dir))
    files.root.mkdir(parents=True, exist_ok=True)
    rng = split_rng(task, "preferences", config.seed)
    problems = (draw_problem(task, rng, mix, held_out=False) for _ in range(config.num_train))
    _write(files.train, _pairs(task, problems, rng, config, judge))
    rng = split_rng(task, "preferences-val", config.seed)
    _write(files.val, _pairs(task, iter(held_out_problems(task, rng, mix, config.num_val)), rng, config, judge))
    return files


def _pairs(
    task: Task, problems: Iterator[Problem], rng: random.Random, config: PreferenceConfig, judge: Judge
) -> Iterator[Mapping[str, Any]]:
    for problem in problems:
        wrong = task.cheap if rng.random() < config.cheap_frac else task.corrupted_worked
        rejected = wrong(problem, rng)
        if judge(task.data_source, rejected, task.ground_truth(problem), {}).correct:
            rejected = task.corrupted_direct(problem, rng)
        yield {
            "prompt": task.question(problem),
            "chosen": task.worked(problem),
            "rejected": rejected,
            "data_source": task.data_source,
        }


def _write(path: Path, pairs: Iterator[Mapping[str, Any]]) -> None:
    pq.write_table(pa.Table.from_pylist(list(pairs), schema=_PAIR), path)
