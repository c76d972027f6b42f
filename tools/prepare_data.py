"""Make Parquet data: of a built-in task, preference pairs of one, or from GSM8K's JSON lines.

python tools/prepare_data.py --task sums --out DIR --levels 2,3
python tools/prepare_data.py --preferences sums --out DIR
python tools/prepare_data.py --gsm8k train.jsonl test.jsonl --out DIR
"""

import argparse
from pathlib import Path

import pyarrow.parquet as pq

from megarl.data.gsm8k import convert_gsm8k
from megarl.data.tasks import TASKS, LevelMix
from megarl.data.tasks.generate import GenerateConfig, PreferenceConfig, generate, generate_preferences
from megarl.rewards import score


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
    source.add_argument("--gsm8k", nargs="+", metavar="FILE", help="writes <name>.parquet for each <name>.jsonl")
    parser.add_argument("--out", required=True, help="directory to write")
    parser.add_argument("--seed", type=int, default=0)
    for split in ("sft", "train", "val"):
        parser.add_argument(f"--num-{split}", type=int, metavar="N", help="rows; default: enough for the tiny model")
    parser.add_argument("--levels", type=parse_mix, metavar="LEVEL[:WEIGHT],…", help="of train, val and preferences")
    parser.add_argument("--sft-levels", type=parse_mix, metavar="LEVEL[:WEIGHT],…", help="of sft")
    return parser.parse_args(), parser


def _write(options: argparse.Namespace) -> list[Path]:
    """The files asked for."""
    if options.gsm8k:
        return [convert_gsm8k(path, options.out) for path in options.gsm8k]
    splits = ("train", "val") if options.preferences else ("sft", "train", "val")
    numbers = {f"num_{split}": getattr(options, f"num_{split}") for split in splits}
    given = {name: value for name, value in numbers.items() if value is not None}
    if options.preferences:
        pairs = PreferenceConfig(seed=options.seed, mix=options.levels, **given)
        written = generate_preferences(TASKS.get(options.preferences), options.out, pairs, score)
        return [written.train, written.val]
    config = GenerateConfig(seed=options.seed, rl_mix=options.levels, sft_mix=options.sft_levels, **given)
    made = generate(TASKS.get(options.task), options.out, config)
    return [made.sft, made.train, made.val]


if __name__ == "__main__":
    main()
