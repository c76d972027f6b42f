"""`python -m tests.e2e.checked_train SEEN.json ARGUMENTS`: `megarl ARGUMENTS` with a `checked` trainer.

Writes what it saw as JSON when the command is done.
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from megarl.host.device.platform import apply_environment

apply_environment()

from megarl import cli  # noqa: E402
from megarl.cluster.cluster import Cluster  # noqa: E402
from megarl.record.recorder import RunRecorder  # noqa: E402
from megarl.train import wiring  # noqa: E402
from megarl.train.inputs import TrainInputs  # noqa: E402
from megarl.train.loop import Trainer  # noqa: E402
from tests.e2e.checked_trainer import Seen, checked  # noqa: E402


def main(argv: Sequence[str]) -> None:
    seen, build_trainer = Seen(), wiring.build_trainer

    def build(inputs: TrainInputs, cluster: Cluster, recorder: RunRecorder) -> Trainer:
        return checked(build_trainer(inputs, cluster, recorder), seen)

    wiring.build_trainer = build
    cli.main(argv[1:])
    Path(argv[0]).write_text(json.dumps(asdict(seen)))


if __name__ == "__main__":
    main(sys.argv[1:])
