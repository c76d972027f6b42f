"""How far do algorithms that score with a hint drift into using it where there is none: policies over steps.

megarl study configs/study/leak.yaml
python tools/study_leak.py runs/leak-study/*-seed* --task sums --out runs/leak-study/leak

Every checkpoint of a run is converted, answers held-out problems without a hint, and is scored with the hint that the
run was trained with. Writes leak.json, leak.md and leak.png.
"""

import argparse
from pathlib import Path

from megarl.host.exit_codes import exit_on_errors


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run_dirs", type=Path, nargs="+", metavar="RUN_DIR", help="a run's directory")
    parser.add_argument("--task", required=True, help="a built-in task, as in quickstart --task")
    parser.add_argument("--num-prompts", type=int, default=128, help="held-out problems (default: 128)")
    parser.add_argument("--num-samples", type=int, default=4, help="answers to each (default: 4)")
    parser.add_argument("--out", type=Path, required=True, help="directory to write")
    options = parser.parse_args()
    with exit_on_errors():
        import torch

        from megarl_lab.study.leak import LeakStudy, measure, write_results

        # Models this small gain nothing from more, and threads that wait for each other slow a busy machine down.
        torch.set_num_threads(1)
        study = LeakStudy(task=options.task, num_prompts=options.num_prompts, num_samples=options.num_samples)
        options.out.mkdir(parents=True, exist_ok=True)
        for path in write_results(options.out, measure(study, options.run_dirs, options.out / "models")):
            print(f"wrote {path}")


if __name__ == "__main__":
    main()
