"""Parquet files of a built-in task: demonstrations, RL prompts and held-out prompts, all from one seed."""

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megarl.data.records import write_parquet
from megarl.data.tasks.base import LevelMix, Problem, Task, check_levels, draw_problem
from megarl.errors import ConfigError

# Draws in a row without a new problem after which the held-out part counts as exhausted.
MAX_STALE_DRAWS = 5000


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateConfig:
    """How many rows of each file, from which levels (None: the task's own mix), and how the teacher mixes.

    `hint_frac` of the demonstrations have the gold solution in the question; of those, `direct_frac` answer
    at once and the rest work it out. Of those without a hint, `cheap_frac` have the cheap style.
    """

    seed: int = 0
    num_sft: int = 25600
    num_train: int = 2000
    num_val: int = 200
    sft_mix: LevelMix | None = None
    rl_mix: LevelMix | None = None
    hint_frac: float = 0.25
    direct_frac: float = 0.3
    cheap_frac: float = 0.6

    def __post_init__(self) -> None:
        for name in ("num_sft", "num_train", "num_val"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}: got {getattr(self, name)}, expected >= 1")
        for name in ("hint_frac", "direct_frac", "cheap_frac"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"{name}: got {getattr(self, name)}, expected 0 to 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskFiles:
    """Where the files of a task lie in a directory."""

    root: Path

    @property
    def sft(self) -> Path:
        return self.root / "sft.parquet"

    @property
    def train(self) -> Path:
        return self.root / "train.parquet"

    @property
    def val(self) -> Path:
        return self.root / "val.parquet"


def generate(task: Task, out_dir: str | Path, config: GenerateConfig) -> TaskFiles:
    """Write sft.parquet, train.parquet (both from the training part) and val.parquet (distinct, held out).

    ConfigError for levels the task lacks, and if it has fewer than `num_val` distinct held-out problems.
    """
    sft_mix = task.sft_mix if config.sft_mix is None else config.sft_mix
    rl_mix = task.rl_mix if config.rl_mix is None else config.rl_mix
    for mix in (sft_mix, rl_mix):
        check_levels(task, mix)
    files = TaskFiles(root=Path(out_dir))
    files.root.mkdir(parents=True, exist_ok=True)
    val = held_out_problems(task, split_rng(task, "val", config.seed), rl_mix, config.num_val)
    rng = split_rng(task, "train", config.seed)
    train = [draw_problem(task, rng, rl_mix, held_out=False) for _ in range(config.num_train)]
    write_parquet(files.sft, _demonstrations(task, sft_mix, config))
    write_parquet(files.train, (_prompt_row(task, p, i, "train") for i, p in enumerate(train)))
    write_parquet(files.val, (_prompt_row(task, p, i, "val") for i, p in enumerate(val)))
    return files


def held_out_problems(task: Task, rng: random.Random, mix: LevelMix, num: int) -> list[Problem]:
    """`num` held-out problems with distinct questions; ConfigError if there do not seem to be that many."""
    problems: dict[str, Problem] = {}
    num_stale = 0
    while len(problems) < num:
        problem = draw_problem(task, rng, mix, held_out=True)
        num_stale = num_stale + 1 if task.question(problem) in problems else 0
        problems.setdefault(task.question(problem), problem)
        if num_stale > MAX_STALE_DRAWS:
            raise ConfigError(
                f"{task.data_source}: got {num} held-out prompts to make, found {len(problems)} "
                f"distinct ones at levels {sorted(mix)}; ask for fewer or add a level"
            )
    return list(problems.values())


def hint_message(hint: str, question: str) -> str:
    """The user turn of a question with a hint."""
    return f"Hint: {hint}\n{question}"


def split_rng(task: Task, split: str, seed: int) -> random.Random:
    """The generator of a file's random choices."""
    return random.Random(f"{task.data_source}/{split}/{seed}")


def _demonstrations(task: Task, mix: LevelMix, config: GenerateConfig) -> Iterator[Mapping[str, Any]]:
    rng = split_rng(task, "sft", config.seed)
    for index in range(config.num_sft):
        problem = draw_problem(task, rng, mix, held_out=False)
        question = task.question(problem)
        if rng.random() < config.hint_frac:
            question = hint_message(task.solution(problem), question)
            answer = task.direct(problem) if rng.random() < config.direct_frac else task.worked(problem)
        else:
            answer = task.cheap(problem, rng) if rng.random() < config.cheap_frac else task.worked(problem)
        yield {
            "prompt": [{"role": "user", "content": question}],
            "data_source": task.data_source,
            "extra_info": {"index": index, "split": "sft", "difficulty_score": problem.level},
            "target": [{"role": "assistant", "content": answer}],
        }


def _prompt_row(task: Task, problem: Problem, index: int, split: str) -> Mapping[str, Any]:
    return {
        "prompt": [{"role": "user", "content": task.question(problem)}],
        "data_source": task.data_source,
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": task.ground_truth(problem)},
        "extra_info": {
            "index": index,
            "split": split,
            "gold_solution": task.solution(problem),
            "difficulty_score": problem.level,
        },
        "target": [{"role": "assistant", "content": task.worked(problem)}],
    }
