"""Compare runs of several algorithms and seeds: a table, comparison.json and comparison.png.

python tools/compare_runs.py runs/study/*-seed* --baseline grpo --out runs/study/comparison
"""

import argparse
import json
from pathlib import Path

from megarl.cli import exit_on_errors
from megarl.report.run import load_runs
from megarl_lab.comparison.groups import GROUPINGS, compare, group_runs
from megarl_lab.comparison.table import comparison_text, write_comparison_png


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run_dirs", type=Path, nargs="+", metavar="RUN_DIR", help="a run's directory")
    parser.add_argument("--by", choices=tuple(GROUPINGS), default="algo", help="algo.name, or run.name without -seedN")
    parser.add_argument("--baseline", help="the algorithm that others are compared with (default: the first run's)")
    parser.add_argument("--paired", action="store_true", help="compare runs with equal seeds, pair by pair")
    parser.add_argument("--last", type=int, default=1, help="a run's score: the mean of so many last validations")
    parser.add_argument("--out", type=Path, required=True, help="directory to write")
    options = parser.parse_args()
    with exit_on_errors():
        groups = group_runs(load_runs(options.run_dirs), options.by)
        comparison = compare(groups, options.baseline, paired=options.paired, last=max(1, options.last))
        print(comparison_text(comparison))
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "comparison.json").write_text(
            json.dumps(comparison.to_dict(), indent=2) + "\n", encoding="utf-8"
        )
        write_comparison_png(comparison, groups, options.out / "comparison.png")
        print(f"wrote {options.out / 'comparison.json'}\nwrote {options.out / 'comparison.png'}")


if __name__ == "__main__":
    main()
