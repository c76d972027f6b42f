"""Run a study: a queue of RL runs on one cluster (see megarl/run/study.py for the file).

python tools/run_queue.py configs/study/sums.yaml

Finished runs are skipped, so the same command goes on after a stop. Exit codes are megarl's; 1 if a run failed.
"""

import argparse
from pathlib import Path

from megarl.host.exit_codes import EXIT_FAILED, exit_on_errors


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", type=Path, help="a study file")
    parser.add_argument("--check", action="store_true", help="check all runs and list them; start nothing")
    options = parser.parse_args()
    with exit_on_errors():
        from megarl.host.device.platform import apply_environment

        apply_environment()
        from megarl.run.study import load_study, plan_study, plan_text, run_study

        study = load_study(options.study)
        if options.check:
            print(plan_text(plan_study(study)))
        elif run_study(study):
            raise SystemExit(EXIT_FAILED)


if __name__ == "__main__":
    main()
