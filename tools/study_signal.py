"""Which signal of a hint is real: how well each finds the first mistake of wrong answers, which an oracle knows.

python tools/study_signal.py configs/study/signal.yaml

Models that the study's directory lacks are trained first. Then answers are sampled without a hint and scored with it,
in every place, by every estimator, with and without another problem's hint as baseline, and with and without the tokens
of the final answer. Writes signal.json, signal.md and signal.png there.
"""

import argparse
from pathlib import Path

from megarl.host.exit_codes import exit_on_errors


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", type=Path, help="a study file")
    options = parser.parse_args()
    with exit_on_errors():
        from megarl.host.device.platform import apply_environment

        apply_environment()
        import torch

        from megarl_lab.study.signal import load_signal_study, measure
        from megarl_lab.study.signal_output import write_results

        # Models this small gain nothing from more, and threads that wait for each other slow a busy machine down.
        torch.set_num_threads(1)
        study = load_signal_study(options.study)
        for path in write_results(Path(study.dir), measure(study)):
            print(f"wrote {path}")


if __name__ == "__main__":
    main()
