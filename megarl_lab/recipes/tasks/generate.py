"""Write files of a built-in task from one seed: demonstrations, prompts to train and validate, preferences, chats."""

import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import pyarrow as pa
import pyarrow.parquet as pq

from megarl.errors import ConfigError
from megarl.types import Reward
from megarl_lab.recipes.public_files import write_parquet
from megarl_lab.recipes.tasks.base import BuiltinTask, LevelMix, Problem, check_levels, draw_problem

# Arguments: data source, answer, ground truth and further information; `megarl.rewards.score` is one.
Judge: TypeAlias = Callable[[str, str, str, Mapping[str, Any]], Reward]

# Draws in a row without a new problem after which the held-out part counts as exhausted.
MAX_STALE_DRAWS = 5000

_PAIR = pa.schema([(name, pa.string()) for name in ("prompt", "chosen", "rejected", "data_source")])


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateConfig:
    """Sizes, levels (None: the task's own mix) and demonstration styles of the files that `generate` writes.

    `hint_frac` of the demonstrations have the gold solution in the question; of these, `direct_frac` answer at once and
    the rest work the answer out. `cheap_frac` of the demonstrations without a hint have the cheap style.
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
    """The paths of the files that `generate` wrote."""

    sft: Path
    train: Path
    val: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class PreferenceConfig:
    """Sizes and difficulty levels of the preference files (None: the levels of the task's demonstrations).

    Chosen answers are worked out step by step. `cheap_frac` of the rejected answers are estimates. The others are
    worked out too, but with mistakes, so that only correctness distinguishes them from chosen answers. If a rejected
    answer happens to be right, a wrong one that is stated at once replaces it.
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
class ChatConfig:
    """Sizes and difficulty levels of the chat files (None: the levels of the task's demonstrations).

    A chat has one to `max_answers` problems and answers. `wrong_frac` of the answers before the last are wrong and
    marked as not to be trained.
    """

    seed: int = 0
    num_train: int = 16384
    num_val: int = 400
    mix: LevelMix | None = None
    max_answers: int = 3
    wrong_frac: float = 0.2

    def __post_init__(self) -> None:
        for name in ("num_train", "num_val", "max_answers"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}: got {getattr(self, name)}, expected >= 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitFiles:
    """The paths of a training file and of a held-out one."""

    train: Path
    val: Path


def generate(task: BuiltinTask, out_dir: str | Path, config: GenerateConfig) -> TaskFiles:
    """Write sft.parquet, train.parquet (both from the training part) and val.parquet (distinct, held out).

    Raises:
        ConfigError: the task lacks a level, or has fewer than `num_val` distinct held-out problems.
    """
    sft_mix = task.sft_mix if config.sft_mix is None else config.sft_mix
    rl_mix = task.rl_mix if config.rl_mix is None else config.rl_mix
    for mix in (sft_mix, rl_mix):
        check_levels(task, mix)
    root = Path(out_dir)
    root.mkdir(parents=True, exist_ok=True)
    files = TaskFiles(sft=root / "sft.parquet", train=root / "train.parquet", val=root / "val.parquet")
    # Every file has random choices of its own.
    sft_rng, train_rng, val_rng = (
        random.Random(f"{task.data_source}/{split}/{config.seed}") for split in ("sft", "train", "val")
    )
    prompts = {
        "val": held_out_problems(task, val_rng, rl_mix, config.num_val),
        "train": [draw_problem(task, train_rng, rl_mix, held_out=False) for _ in range(config.num_train)],
    }
    write_parquet(files.sft, _demonstrations(task, sft_rng, sft_mix, config))
    for split, problems in prompts.items():
        rows = [
            {
                "prompt": [{"role": "user", "content": problem.question}],
                "data_source": task.data_source,
                "ability": "math",
                "reward_model": {"style": "rule", "ground_truth": problem.ground_truth},
                "extra_info": {
                    "index": index,
                    "split": split,
                    "gold_solution": problem.solution,
                    "difficulty_score": problem.level,
                },
                "target": [{"role": "assistant", "content": problem.worked}],
            }
            for index, problem in enumerate(problems)
        ]
        write_parquet(root / f"{split}.parquet", rows)
    return files


def held_out_problems(task: BuiltinTask, rng: random.Random, mix: LevelMix, num: int) -> list[Problem]:
    """Draw `num` held-out problems with distinct questions; raise ConfigError if there seem to be too few."""
    problems: dict[str, Problem] = {}
    num_stale = 0
    while len(problems) < num:
        problem = draw_problem(task, rng, mix, held_out=True)
        num_stale = num_stale + 1 if problem.question in problems else 0
        problems.setdefault(problem.question, problem)
        if num_stale > MAX_STALE_DRAWS:
            raise ConfigError(
                f"{task.data_source}: got {num} held-out prompts to make, found {len(problems)} "
                f"distinct ones at levels {sorted(mix)}; ask for fewer or add a level"
            )
    return list(problems.values())


def _demonstrations(
    task: BuiltinTask, rng: random.Random, mix: LevelMix, config: GenerateConfig
) -> Iterator[Mapping[str, Any]]:
    for index in range(config.num_sft):
        problem = draw_problem(task, rng, mix, held_out=False)
        question = problem.question
        if rng.random() < config.hint_frac:
            question = f"Hint: {problem.solution}\n{question}"
            answer = problem.direct if rng.random() < config.direct_frac else problem.worked
        else:
            answer = task.cheap(problem, rng) if rng.random() < config.cheap_frac else problem.worked
        yield {
            "prompt": [{"role": "user", "content": question}],
            "data_source": task.data_source,
            "extra_info": {"index": index, "split": "sft", "difficulty_score": problem.level},
            "target": [{"role": "assistant", "content": answer}],
        }


def generate_preferences(task: BuiltinTask, out_dir: str | Path, config: PreferenceConfig, judge: Judge) -> SplitFiles:
    """Write preferences.parquet, and preferences-val.parquet with distinct held-out problems.

    Each row has a right answer and a wrong one that looks similar. `judge` scores answers; it shows whether an answer
    that is meant to be wrong is right by chance.

    Raises:
        ConfigError: the task lacks a level, or has fewer than `num_val` distinct held-out problems.
    """
    mix = task.sft_mix if config.mix is None else config.mix
    check_levels(task, mix)
    root = Path(out_dir)
    root.mkdir(parents=True, exist_ok=True)
    files = SplitFiles(train=root / "preferences.parquet", val=root / "preferences-val.parquet")
    for file in (files.train, files.val):
        rng = random.Random(f"{task.data_source}/{file.stem}/{config.seed}")
        # Problems of the training part are drawn one by one, between the random choices of their wrong answers.
        problems: Iterable[Problem] = (
            (draw_problem(task, rng, mix, held_out=False) for _ in range(config.num_train))
            if file == files.train
            else held_out_problems(task, rng, mix, config.num_val)
        )
        pairs = []
        for problem in problems:
            wrong = task.cheap if rng.random() < config.cheap_frac else task.corrupted_worked
            rejected = wrong(problem, rng)
            if judge(task.data_source, rejected, problem.ground_truth, {}).correct:
                rejected = task.corrupted_direct(problem, rng)
            texts = {"prompt": problem.question, "chosen": problem.worked, "rejected": rejected}
            pairs.append({**texts, "data_source": task.data_source})
        pq.write_table(pa.Table.from_pylist(pairs, schema=_PAIR), file)
    return files


def generate_chats(task: BuiltinTask, out_dir: str | Path, config: ChatConfig) -> SplitFiles:
    """Write chats.parquet, and chats-val.parquet with held-out problems, in OpenAI's form (`messages`).

    Raises:
        ConfigError: the task lacks a level.
    """
    mix = task.sft_mix if config.mix is None else config.mix
    check_levels(task, mix)
    root = Path(out_dir)
    root.mkdir(parents=True, exist_ok=True)
    files = SplitFiles(train=root / "chats.parquet", val=root / "chats-val.parquet")
    for file, num_chats in ((files.train, config.num_train), (files.val, config.num_val)):
        rng = random.Random(f"{task.data_source}/{file.stem}/{config.seed}")
        rows = []
        for _ in range(num_chats):
            messages: list[dict[str, Any]] = []
            num_answers = rng.randint(1, config.max_answers)
            for place in range(num_answers):
                problem = draw_problem(task, rng, mix, held_out=file == files.val)
                messages.append({"role": "user", "content": problem.question})
                if place + 1 < num_answers and rng.random() < config.wrong_frac:
                    wrong = task.corrupted_worked(problem, rng)
                    messages.append({"role": "assistant", "content": wrong, "train": False})
                else:
                    messages.append({"role": "assistant", "content": problem.worked})
            rows.append({"messages": messages})
        pq.write_table(pa.Table.from_pylist(rows), file)
    return files
