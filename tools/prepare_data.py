"""Make data files: of a built-in task, preference pairs or chats of one, or from published files.

python tools/prepare_data.py --task sums --out DIR --levels 2,3
python tools/prepare_data.py --preferences sums --out DIR
python tools/prepare_data.py --chats sums --out DIR
python tools/prepare_data.py --gsm8k train.jsonl test.jsonl --out DIR
python tools/prepare_data.py --countdown train.parquet --out DIR
python tools/prepare_data.py --distinct dapo-math-17k.parquet --out DIR
python tools/prepare_data.py --reasoning-gym chain_sum 'leg_counting={"max_animals": 5}' --out DIR
python tools/prepare_data.py --math MATH/train --math-test MATH-500/test.jsonl --out DIR
"""

import argparse
import json
from functools import partial
from pathlib import Path

import pyarrow.parquet as pq

from megarl.rewards import score
from megarl_answers.extract import last_boxed
from megarl_answers.options import AnswerOptions
from megarl_lab.recipes.gsm8k import convert_gsm8k
from megarl_lab.recipes.hendrycks_math import TEST_SOURCE, TRAIN_SOURCE, convert_math
from megarl_lab.recipes.public_files import convert_countdown, write_distinct
from megarl_lab.recipes.reasoning_gym import write_reasoning_gym
from megarl_lab.recipes.tasks import TASKS, LevelMix
from megarl_lab.recipes.tasks.generate import (
    ChatConfig,
    GenerateConfig,
    PreferenceConfig,
    generate,
    generate_chats,
    generate_preferences,
)


def parse_mix(text: str) -> LevelMix:
    """`2,3` (equal weights) or `2:0.7,3:0.3`."""
    pairs = [part.partition(":") for part in text.split(",")]
    return {int(level): float(weight or 1) for level, _, weight in pairs}


def main() -> None:
    options, parser = _parse()
    try:
        files = _write(options)
    except ValueError as error:
        parser.error(str(error))
    for file in files:
        print(f"{file}: {pq.read_metadata(file).num_rows} rows")


def _parse() -> tuple[argparse.Namespace, argparse.ArgumentParser]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--task", choices=tuple(TASKS), help="writes sft, train and val .parquet")
    source.add_argument("--preferences", choices=tuple(TASKS), help="writes preferences and preferences-val .parquet")
    source.add_argument("--chats", choices=tuple(TASKS), help="writes chats and chats-val .parquet")
    source.add_argument("--gsm8k", nargs="+", metavar="FILE", help="writes <name>.parquet for each <name>.jsonl")
    source.add_argument(
        "--countdown", nargs="+", type=Path, metavar="FILE", help="of TinyZero: writes <name>.parquet for each file"
    )
    source.add_argument(
        "--distinct",
        nargs="+",
        type=Path,
        metavar="FILE",
        help="of verl's or LUFFY's columns, such as DAPO-Math-17k: writes distinct.parquet with each prompt once",
    )
    source.add_argument(
        "--math",
        nargs="+",
        type=Path,
        metavar="FILE",
        help="of hendrycks MATH, or its directories: writes train.parquet with the problems of all",
    )
    source.add_argument(
        "--reasoning-gym",
        nargs="+",
        metavar="NAME[=JSON]",
        help="datasets of the package reasoning-gym, with settings: writes train and val .parquet",
    )
    parser.add_argument(
        "--math-test",
        nargs="+",
        type=Path,
        metavar="FILE",
        help="with --math: writes test.parquet, such as MATH-500, whose problems are left out of train.parquet",
    )
    parser.add_argument("--out", required=True, help="directory to write")
    parser.add_argument("--seed", type=int, default=0)
    for split in ("sft", "train", "val"):
        parser.add_argument(f"--num-{split}", type=int, metavar="N", help="rows; default: enough for the tiny model")
    parser.add_argument("--levels", type=parse_mix, metavar="LEVEL[:WEIGHT],…", help="of all but sft")
    parser.add_argument("--sft-levels", type=parse_mix, metavar="LEVEL[:WEIGHT],…", help="of sft")
    options = parser.parse_args()
    if options.math_test and not options.math:
        parser.error("--math-test: goes with --math; add the training files, or leave it out")
    return options, parser


def _write(options: argparse.Namespace) -> list[Path]:
    """The files asked for."""
    if options.math:
        out, problems, files = Path(options.out), list[str](), []
        answer = partial(last_boxed, options=AnswerOptions())
        if options.math_test:
            files.append(out / "test.parquet")
            problems = convert_math(options.math_test, files[-1], data_source=TEST_SOURCE, read_answer=answer)
        files.append(out / "train.parquet")
        convert_math(options.math, files[-1], data_source=TRAIN_SOURCE, read_answer=answer, left_out=set(problems))
        return files
    if options.countdown:
        converted = [Path(options.out) / f"{path.stem}.parquet" for path in options.countdown]
        for path, target in zip(options.countdown, converted, strict=True):
            convert_countdown(path, target)
        return converted
    if options.distinct:
        target = Path(options.out) / "distinct.parquet"
        print(f"left out {write_distinct(options.distinct, target)} rows whose prompt had come before")
        return [target]
    if options.reasoning_gym:
        named = (text.partition("=") for text in options.reasoning_gym)
        datasets = {name: json.loads(settings or "{}") for name, _, settings in named}
        numbers = {"num_train": options.num_train or 10_000, "num_val": options.num_val or 200}
        return write_reasoning_gym(datasets, options.out, **numbers, seed=options.seed)
    if options.gsm8k:
        return [convert_gsm8k(path, options.out) for path in options.gsm8k]
    splits = ("train", "val") if options.preferences or options.chats else ("sft", "train", "val")
    numbers = {f"num_{split}": getattr(options, f"num_{split}") for split in splits}
    given = {name: value for name, value in numbers.items() if value is not None}
    if options.preferences:
        pairs = PreferenceConfig(seed=options.seed, mix=options.levels, **given)
        written = generate_preferences(TASKS.get(options.preferences), options.out, pairs, score)
        return [written.train, written.val]
    if options.chats:
        chats = ChatConfig(seed=options.seed, mix=options.levels, **given)
        written = generate_chats(TASKS.get(options.chats), options.out, chats)
        return [written.train, written.val]
    config = GenerateConfig(seed=options.seed, rl_mix=options.levels, sft_mix=options.sft_levels, **given)
    made = generate(TASKS.get(options.task), options.out, config)
    return [made.sft, made.train, made.val]


if __name__ == "__main__":
    main()
