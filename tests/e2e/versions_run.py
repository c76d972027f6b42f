"""`python -m tests.e2e.versions_run DIR ARGUMENTS`: `megarl ARGUMENTS`, with every version of the policy in DIR."""

import sys
from collections.abc import Sequence
from pathlib import Path

from megarl.device.platform import apply_environment

apply_environment()

from megarl import cli  # noqa: E402
from megarl.cluster import Cluster  # noqa: E402
from megarl.record.recorder import RunRecorder  # noqa: E402
from megarl.train import wiring  # noqa: E402
from megarl.train.export import export_model  # noqa: E402
from megarl.train.inputs import TrainInputs  # noqa: E402
from megarl.train.loop import Trainer  # noqa: E402


def main(argv: Sequence[str]) -> None:
    build_trainer = wiring.build_trainer

    def build(inputs: TrainInputs, cluster: Cluster, recorder: RunRecorder) -> Trainer:
        trainer = build_trainer(inputs, cluster, recorder)
        push = trainer.engines.push

        def push_and_export(version: int) -> dict[str, float]:
            metrics = push(version)
            export_model(cluster.workers, inputs.roles[0], Path(argv[0]) / str(version))
            return metrics

        trainer.engines.push = push_and_export  # type: ignore[method-assign]
        return trainer

    wiring.build_trainer = build
    cli.main(argv[1:])


if __name__ == "__main__":
    main(sys.argv[1:])
