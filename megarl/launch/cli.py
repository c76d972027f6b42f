"""`megarl slurm run` and `megarl slurm submit`."""

import argparse
from pathlib import Path


def add_slurm(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add `slurm` to megarl's commands."""
    slurm = commands.add_parser("slurm", help="run on the hosts of a Slurm job")
    actions = slurm.add_subparsers(dest="action", required=True)
    _add_run(actions)
    _add_submit(actions)


def _add_run(actions: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    run = actions.add_parser("run", help="inside a job: Ray on every host, then a megarl command (see slurm/*.sbatch)")
    run.add_argument("--max-restarts", type=int, default=3, help="after failures, from the last checkpoint")
    run.add_argument("argv", nargs=argparse.REMAINDER, metavar="COMMAND", help="-- train, sft or eval, and its options")
    run.set_defaults(run=_run)


def _add_submit(actions: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    submit = actions.add_parser("submit", help="check a run file against the nodes it is to use, and submit it")
    submit.add_argument("--config", type=Path, required=True, help="a run file")
    submit.add_argument("overrides", nargs="*", help="settings such as actor.optimizer.lr=1e-5")
    submit.add_argument("--sft", action="store_true", help="the supervised warm start instead of train")
    submit.add_argument("--nodes", type=int, required=True)
    submit.add_argument("--gpus-per-node", type=int, default=8, help="0: nodes without GPUs, for small models")
    submit.add_argument("--cpus-per-node", type=int, default=64)
    submit.add_argument("--time", default="24:00:00", help="limit, as Slurm writes it")
    submit.add_argument("--signal-s", type=int, default=600, help="seconds before the limit for the last checkpoint")
    submit.add_argument("--max-restarts", type=int, default=3)
    submit.add_argument("--chain", type=int, default=1, help="jobs in a row, each continuing the one before")
    submit.add_argument(
        "--sbatch", action="append", default=[], metavar="OPTION", help="for sbatch, as in --sbatch=--partition=gpu"
    )
    submit.add_argument("--dry-run", action="store_true", help="print the script and submit nothing")
    submit.set_defaults(run=_submit)


def _run(arguments: argparse.Namespace) -> None:
    from megarl.launch.job import run_job

    argv = arguments.argv[1:] if arguments.argv[:1] == ["--"] else arguments.argv
    raise SystemExit(run_job(argv, max_restarts=arguments.max_restarts))


def _submit(arguments: argparse.Namespace) -> None:
    from megarl.launch.submit import SubmitRequest, submit

    submit(
        SubmitRequest(
            command="sft" if arguments.sft else "train",
            config=arguments.config,
            overrides=tuple(arguments.overrides),
            num_nodes=arguments.nodes,
            gpus_per_node=arguments.gpus_per_node,
            cpus_per_node=arguments.cpus_per_node,
            time_limit=arguments.time,
            signal_s=arguments.signal_s,
            max_restarts=arguments.max_restarts,
            num_jobs=arguments.chain,
            sbatch_options=tuple(arguments.sbatch),
        ),
        dry_run=arguments.dry_run,
    )
