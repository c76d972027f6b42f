"""Make Parquet data: of a built-in task, or from GSM8K's JSON lines.

python tools/prepare_data.py --task sums --out DIR --levels 2,3
python tools/prepare_data.py --gsm8k train.jsonl test.jsonl --out DIR
"""

import argparse

import pyarrow.parquet as pq

from megarl.data.gsm8k import convert_gsm8k
from megarl.data.tasks import TASKS, LevelMix
from megarl.data.tasks.generate import GenerateConfig, generate


def parse_mix(text: str) -> LevelMix:
    """`2,3` (equal weights) or `2:0.7,3:0.3`."""
    pairs = [part.partition(":") for part in text.split(",")]
    return {int(level): float(weight or 1) for level, _, weight in pairs}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = GenerateConfig()
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--task", choices=tuple(TASKS), help="writes sft, train and val .parquet")
    source.add_argument("--gsm8k", nargs="+", metavar="FILE", help="writes <name>.parquet for each <name>.jsonl")
    parser.add_argument("--out", required=True, help="directory to write")
    parser.add_argument("--seed", type=int, default=default.seed)
    for split in ("sft", "train", "val"):
        parser.add_argument(f"--num-{split}", type=int, default=getattr(default, f"num_{split}"), help="rows")
    parser.add_argument("--levels", type=parse_mix, metavar="LEVEL[:WEIGHT],…", help="of train and val")
    parser.add_argument("--sft-levels", type=parse_mix, metavar="LEVEL[:WEIGHT],…", help="of sft")
    options = parser.parse_args()
    try:
        if options.gsm8k:
            files = [convert_gsm8k(path, options.out) for path in options.gsm8k]
        else:
            config = GenerateConfig(
                seed=options.seed,
                num_sft=options.num_sft,
                num_train=options.num_train,
                num_val=options.num_val,
                rl_mix=options.levels,
                sft_mix=options.sft_levels,
            )
            made = generate(TASKS.get(options.task), options.out, config)
            files = [made.sft, made.train, made.val]
    except ValueError as error:
        parser.error(str(error))
    for file in files:
        print(f"{file}: {pq.read_metadata(file).num_rows} rows")


if __name__ == "__main__":
    main()
