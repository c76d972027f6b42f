"""Define the command `megarl check-plugin`, which tries a user's file without a run."""

import argparse
from typing import Any

from megarl.errors import ConfigError
from megarl.host.exit_codes import EXIT_FAILED
from megarl.host.streams import print_lines


def add_check_plugin(commands: Any) -> None:
    """Add the command `check-plugin` to the commands of a parser."""
    command = commands.add_parser("check-plugin", help="try losses, rewards, environments and agents of one's own")
    command.add_argument("file", metavar="FILE", help="a Python file, or what of it to try: FILE.py:NAME")
    command.add_argument("--limit-s", type=float, default=60.0, metavar="S", help="time limit; default: 60")
    command.set_defaults(run=_check_plugin)


def _check_plugin(arguments: argparse.Namespace) -> None:
    from megarl.config.load import with_overrides
    from megarl.config.schema import Config
    from megarl.train.rehearsal import Trial, try_out

    file, _, name = arguments.file.partition(".py:")
    file = f"{file}.py" if name else file
    if not file.endswith(".py"):
        raise ConfigError(f"megarl check-plugin: got {arguments.file}, expected a Python file, its name ending in .py")
    # It may be for a run that reads images.
    chosen = ["data.image_key=images", f"algo.plugins=[{file!r}]", f"run.rehearsal_s={arguments.limit_s}"]
    config = with_overrides(Config(), chosen)
    found = try_out(Trial(config=config, every=not name, file=file, name=name))
    # A mistake begins with the file, and names the part.
    mistaken = [
        about for about in found.tried if any(about.rpartition(": ")[2] in mistake for mistake in found.mistakes)
    ]
    lines = [f"{about}: well" for about in found.tried[1:] if about not in mistaken]
    lines += [f"warning: {warning}" for warning in found.warnings]
    for line in (*lines, *(f"mistake: {mistake}" for mistake in found.mistakes)):
        print_lines(line)
    if found.mistakes:
        raise SystemExit(EXIT_FAILED)
