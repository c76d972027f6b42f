"""`python -m tests.e2e.versions_run DIR ARGUMENTS`: `megarl ARGUMENTS`, with every version of the policy in DIR.

Requests of new samples, after the first ones, reach the engine just before an update, which waits until some of them
have begun (`held_engines`): it finds samples under way, whatever the machine's speed. No step needs these requests
before the next but one.
"""

import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megarl.host.device.platform import apply_environment

apply_environment()

import ray  # noqa: E402

from megarl import cli  # noqa: E402
from megarl.cluster.cluster import Cluster  # noqa: E402
from megarl.host import loop  # noqa: E402
from megarl.record.recorder import RunRecorder  # noqa: E402
from megarl.rollout.engine import Completion, GenerationRequest  # noqa: E402
from megarl.train import wiring  # noqa: E402
from megarl.train.export import export_model  # noqa: E402
from megarl.train.inputs import TrainInputs  # noqa: E402
from megarl.train.loop import Trainer  # noqa: E402
from tests.helpers.loops import turns  # noqa: E402

HOOK = "tests.helpers.held_engines.hold_engines"


def main(argv: Sequence[str]) -> None:
    build_trainer = wiring.build_trainer

    def build(inputs: TrainInputs, cluster: Cluster, recorder: RunRecorder) -> Trainer:
        trainer = build_trainer(inputs, cluster, recorder)
        push, group, flush = trainer.supervisor.push, cluster.engines, cluster.engines.flush
        held: list[tuple[GenerationRequest, asyncio.Future[Completion]]] = []
        is_first = True

        def flush_later() -> None:
            if not is_first:
                held.extend(each for each in group._outbox if not each[0].num_before)
                group._outbox = [each for each in group._outbox if each[0].num_before]
            flush()

        def push_and_export(version: int) -> dict[str, float]:
            nonlocal is_first
            is_first &= version == 0
            group._outbox = [*group._outbox, *held]
            held.clear()
            flush()
            # The requests leave before the update.
            loop.wait(turns())
            metrics = push(version)
            export_model(cluster.workers, inputs.roles[0], Path(argv[0]) / str(version))
            return metrics

        trainer.supervisor.push = push_and_export  # type: ignore[method-assign]
        group.flush = flush_later  # type: ignore[method-assign]
        return trainer

    init = ray.init

    def init_with_hook(*, runtime_env: dict[str, Any], **given: Any) -> Any:
        return init(runtime_env=runtime_env | {"worker_process_setup_hook": HOOK}, **given)

    ray.init = init_with_hook
    wiring.build_trainer = build
    cli.main(argv[1:])


if __name__ == "__main__":
    main(sys.argv[1:])
