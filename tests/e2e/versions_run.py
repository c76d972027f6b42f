"""`python -m tests.e2e.versions_run DIR ARGUMENTS`: `megarl ARGUMENTS`, with every version of the policy in DIR.

Requests of new samples, after the first ones, reach the engine just before an update, which waits until some of them
have begun (`held_engines`): it finds samples under way, whatever the machine's speed. No step needs these requests
before the next but one.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megarl.device.platform import apply_environment

apply_environment()

from megarl import cli  # noqa: E402
from megarl.cluster.cluster import Cluster  # noqa: E402
from megarl.record.recorder import RunRecorder  # noqa: E402
from megarl.train import wiring  # noqa: E402
from megarl.train.export import export_model  # noqa: E402
from megarl.train.inputs import TrainInputs  # noqa: E402
from megarl.train.loop import Trainer  # noqa: E402
from tools.bench.paced import set_up_workers  # noqa: E402


def main(argv: Sequence[str]) -> None:
    build_trainer = wiring.build_trainer

    def build(inputs: TrainInputs, cluster: Cluster, recorder: RunRecorder) -> Trainer:
        trainer = build_trainer(inputs, cluster, recorder)
        push, submit = trainer.engines.push, trainer.engines.submit
        held: list[tuple[Any, ...]] = []
        is_first = True

        def submit_later(*given: Any) -> None:
            nonlocal is_first
            if is_first or given[0][0].num_before:
                submit(*given)
            else:
                held.append(given)

        def push_and_export(version: int) -> dict[str, float]:
            nonlocal is_first
            is_first &= version == 0
            for given in held:
                submit(*given)
            held.clear()
            metrics = push(version)
            export_model(cluster.workers, inputs.roles[0], Path(argv[0]) / str(version))
            return metrics

        trainer.engines.push = push_and_export  # type: ignore[method-assign]
        trainer.engines.submit = submit_later  # type: ignore[method-assign]
        return trainer

    set_up_workers("tests.helpers.held_engines.hold_engines")
    wiring.build_trainer = build
    cli.main(argv[1:])


if __name__ == "__main__":
    main(sys.argv[1:])
