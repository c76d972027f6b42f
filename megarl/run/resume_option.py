"""Define the option --resume of the commands that train."""

import argparse
from typing import ClassVar


class ResumeOption(argparse.Action):
    """The option --resume, also as --resume=newest-whole, which wins: the script of a Slurm job always adds the first.

    Its values are those of `megarl.record.checkpoints.Resume`. Its value is not optional for argparse, which would take
    the run file that may follow.
    """

    VALUES: ClassVar = {"--resume": "newest", "--resume=newest-whole": "newest-whole"}

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: object, option: str | None = None
    ) -> None:
        assert option is not None
        if namespace.resume is None or option != "--resume":
            namespace.resume = self.VALUES[option]
