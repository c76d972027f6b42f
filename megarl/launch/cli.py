"""Parse the command-line arguments of `megarl slurm run` and `megarl slurm submit`."""

import argparse
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megarl.launch.submit import Forecast, NodesRequest

# A command line of megarl to its arguments.
Parse = Callable[[Sequence[str]], argparse.Namespace]


def add_slurm(
    commands: "argparse._SubParsersAction[argparse.ArgumentParser]",
    parse: Parse,
    trainings: Sequence[str],
    forecast: "Forecast",
) -> None:
    """Add `megarl slurm` to the commands. Its action `run` takes another megarl command line, which `parse` reads.

    trainings: the names of the commands that train. forecast: says how long a run takes to stop.
    """
    slurm = commands.add_parser("slurm", help="run on the hosts of a Slurm job")
    actions = slurm.add_subparsers(dest="action", required=True)
    run = actions.add_parser("run", help="inside a job: Ray on every host, then a megarl command (see slurm/*.sbatch)")
    run.add_argument("--max-restarts", type=int, default=3, help="after failures, from the last checkpoint")
    run.add_argument("argv", nargs=argparse.REMAINDER, metavar="COMMAND", help="after --: eval, or any training")
    run.set_defaults(run=functools.partial(_run, parse))
    submit = actions.add_parser("submit", help="check a run file against the nodes it is to use, and submit it")
    submit.add_argument("--config", type=Path, required=True, help="a run file")
    submit.add_argument("overrides", nargs="*", help="settings such as actor.optimizer.lr=1e-5")
    submit.add_argument("--command", choices=trainings, default="train", help="what to run (default: train)")
    _add_nodes(submit, "", "the trainer's, or all")
    _add_nodes(submit, "engine-", "of a heterogeneous job (placement.mode=split), the engines'")
    _add_nodes(submit, "environment-", "of a heterogeneous job, the environments', without GPUs", has_gpus=False)
    submit.add_argument(
        "--spare-nodes", type=int, default=0, metavar="N", help="further nodes, for restarts after others were lost"
    )
    submit.add_argument("--time", default="24:00:00", help="limit, as Slurm writes it")
    submit.add_argument("--signal-s", type=int, default=600, help="seconds before the limit for the last checkpoint")
    submit.add_argument("--max-restarts", type=int, default=3)
    submit.add_argument("--chain", type=int, default=1, help="jobs in a row, each continuing the one before")
    submit.add_argument("--dry-run", action="store_true", help="print the script and submit nothing")
    submit.set_defaults(run=functools.partial(_submit, forecast))


def _add_nodes(submit: argparse.ArgumentParser, prefix: str, whose: str, *, has_gpus: bool = True) -> None:
    """Add the options that describe a group of nodes to `megarl slurm submit`."""
    submit.add_argument(f"--{prefix}nodes", type=int, required=not prefix, metavar="N", help=f"nodes: {whose}")
    if has_gpus:
        said = "0: none, for small models"
        submit.add_argument(f"--{prefix}gpus-per-node", type=int, default=8, metavar="N", help=said)
    submit.add_argument(f"--{prefix}cpus-per-node", type=int, default=64, metavar="N")
    submit.add_argument(
        f"--{prefix}sbatch", action="append", default=[], metavar="OPTION", help="for sbatch, such as --partition=gpu"
    )


def _nodes(arguments: argparse.Namespace, prefix: str) -> "NodesRequest | None":
    from megarl.launch.submit import NodesRequest

    given = vars(arguments)
    if given[f"{prefix}nodes"] is None:
        return None
    return NodesRequest(
        num_nodes=given[f"{prefix}nodes"],
        gpus_per_node=given.get(f"{prefix}gpus_per_node", 0),
        cpus_per_node=given[f"{prefix}cpus_per_node"],
        sbatch_options=tuple(given[f"{prefix}sbatch"]),
    )


def _run(parse: Parse, arguments: argparse.Namespace) -> None:
    from megarl.launch.job import run_job

    argv = arguments.argv[1:] if arguments.argv[:1] == ["--"] else arguments.argv
    raise SystemExit(run_job(argv, parse(argv), max_restarts=arguments.max_restarts))


def _submit(forecast: "Forecast", arguments: argparse.Namespace) -> None:
    from megarl.launch.submit import SubmitRequest, submit

    nodes = _nodes(arguments, "")
    assert nodes is not None, "--nodes is required"
    submit(
        SubmitRequest(
            command=arguments.command,
            config=arguments.config,
            overrides=tuple(arguments.overrides),
            nodes=nodes,
            engine_nodes=_nodes(arguments, "engine_"),
            environment_nodes=_nodes(arguments, "environment_"),
            num_spares=arguments.spare_nodes,
            time_limit=arguments.time,
            signal_s=arguments.signal_s,
            max_restarts=arguments.max_restarts,
            num_jobs=arguments.chain,
            forecast=forecast,
        ),
        dry_run=arguments.dry_run,
    )
