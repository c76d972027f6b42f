"""Define the command that forecasts a run before it starts."""

import argparse
from pathlib import Path


def add_plan(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add `plan`."""
    command = commands.add_parser("plan", help="rank the layouts of a model that fit a number of GPUs, by a cost model")
    command.add_argument("overrides", nargs="*", help="settings such as rollout.max_response_tokens=8192")
    command.add_argument("--model", required=True, metavar="MODEL", help="a directory with config.json, or qwen3-32b")
    command.add_argument("--gpus", type=int, required=True, metavar="N", help="number of GPUs")
    command.add_argument("--gpus-per-node", type=int, default=8, metavar="N", help="of one node; default: 8")
    command.add_argument("--device-gib", type=float, default=80.0, help="memory of one GPU; default: 80")
    command.add_argument(
        "--calibration", type=Path, metavar="FILE", help="timeline.jsonl of a run, by which to forecast"
    )
    command.add_argument("--most", type=int, default=5, metavar="N", help="layouts to print; default: 5")
    command.add_argument("--json", action="store_true", help="print JSON")
    command.set_defaults(run=_plan)


def _plan(arguments: argparse.Namespace) -> None:
    from megarl.forecast.layout_search import new_search
    from megarl.forecast.plan_layouts import print_layouts

    search = new_search(
        arguments.model,
        gpus=arguments.gpus,
        per_node=arguments.gpus_per_node,
        device_gib=arguments.device_gib,
        overrides=arguments.overrides,
        calibration=arguments.calibration,
    )
    print_layouts(search, most=arguments.most, as_json=arguments.json)
