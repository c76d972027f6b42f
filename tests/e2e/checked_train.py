"""`python -m tests.e2e.checked_train SEEN.json ARGUMENTS`: `megarl ARGUMENTS` with a `CheckedTrainer`.

Writes what it saw as JSON when the command is done.
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from megarl.device.platform import apply_environment

apply_environment()

from megarl import cli  # noqa: E402
from megarl.train import loop as trainer  # noqa: E402
from tests.e2e.checked_trainer import CheckedTrainer, Seen  # noqa: E402


class SeenTrainer(CheckedTrainer):
    """The trainer of the one run of this process."""

    seen = Seen()


def main(argv: Sequence[str]) -> None:
    trainer.Trainer = SeenTrainer  # type: ignore[misc]
    cli.main(argv[1:])
    Path(argv[0]).write_text(json.dumps(asdict(SeenTrainer.seen)))


if __name__ == "__main__":
    main(sys.argv[1:])
