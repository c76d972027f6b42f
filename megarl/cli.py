"""The `megarl` command: train, sft, report, quickstart."""

import argparse
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import NoReturn

from megarl.errors import (
    ConfigError,
    DataError,
    MismatchError,
    NonFiniteError,
    RunError,
    WeightSyncError,
    WorkerError,
)

EXIT_FAILED = 1
EXIT_BAD_INPUT = 2


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point. Exit code 2: bad input, nothing was started; 1: the run failed; 128 + n: ended by signal n."""
    arguments = _parse(argv)
    received = _leave_on_signals()
    try:
        arguments.run(arguments)
    except SystemExit as leaving:
        # Where Ray waits, it replaces the handler's exit code by its own.
        raise SystemExit(128 + received[0]) if received else leaving from None
    except (ConfigError, DataError) as error:
        _fail(error, EXIT_BAD_INPUT)
    except (MismatchError, NonFiniteError, RunError, WeightSyncError, WorkerError) as error:
        _fail(error, EXIT_FAILED)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Overrides may follow options: argparse by itself takes them only right after the run file."""
    parser = _parser()
    arguments, rest = parser.parse_known_args(argv)
    if rest and (not hasattr(arguments, "overrides") or any(word.startswith("-") for word in rest)):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:
        arguments.overrides = [*arguments.overrides, *rest]
    return arguments


def _leave_on_signals() -> list[int]:
    """Let SIGINT and SIGTERM end the command in order; the list will hold the signal that did."""
    signals, received = (signal.SIGINT, signal.SIGTERM), list[int]()

    def leave(signum: int, _: FrameType | None) -> NoReturn:
        # A second signal must not interrupt the clean-up that the first one starts.
        for each in signals:
            signal.signal(each, signal.SIG_IGN)
        received.append(signum)
        raise SystemExit(128 + signum)

    for each in signals:
        signal.signal(each, leave)
    return received


def _fail(error: Exception, code: int) -> NoReturn:
    # One line, whatever a library put into its message.
    print("error:", " ".join(str(error).split()), file=sys.stderr)
    raise SystemExit(code)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="megarl", description="Reinforcement learning for language models.")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, text in (
        ("train", "train a policy by reinforcement learning"),
        ("sft", "train a policy on demonstrations"),
    ):
        command = commands.add_parser(name, help=text)
        command.add_argument("config", type=Path, help="a run file, such as configs/run/sums-rl.yaml")
        command.add_argument("overrides", nargs="*", help="settings such as actor.optimizer.lr=1e-5")
        command.add_argument("--overwrite", action="store_true", help="replace a run of the same name")
        command.set_defaults(run=_run_file(name))
    report = commands.add_parser("report", help="write a run's report as HTML and PNG")
    report.add_argument("run_dir", type=Path, help="the run's directory")
    report.add_argument("others", type=Path, nargs="*", help="runs to compare it with")
    report.set_defaults(run=_report)
    quick = commands.add_parser("quickstart", help="teach a tiny model a task, from data to report")
    quick.add_argument("--algo", default="grpo", help="a file of configs/algo")
    quick.add_argument("--task", default="sums", help="a built-in task")
    quick.add_argument("--seed", type=int, default=0)
    quick.set_defaults(run=_quickstart)
    return parser


# Heavy imports wait until the command is known, so that `megarl --help` and errors answer at once.


def _run_file(command: str) -> Callable[[argparse.Namespace], None]:
    def run(arguments: argparse.Namespace) -> None:
        from megarl.parallel.platform import apply_environment

        apply_environment()
        from megarl import runs
        from megarl.config import load_config

        config = load_config(arguments.config, arguments.overrides)
        getattr(runs, command)(config, overwrite=arguments.overwrite)

    return run


def _report(arguments: argparse.Namespace) -> None:
    from megarl.report import write_report

    paths = write_report(arguments.run_dir, arguments.others)
    print(f"wrote {paths.html}\nwrote {paths.png}")


def _quickstart(arguments: argparse.Namespace) -> None:
    from megarl.parallel.platform import apply_environment

    apply_environment()
    from megarl.quickstart import quickstart

    quickstart(algo=arguments.algo, task=arguments.task, seed=arguments.seed)


if __name__ == "__main__":
    main()
