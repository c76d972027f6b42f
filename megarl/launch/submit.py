"""A job script for a run file: checked against the nodes that it asks for, filled in, submitted."""

import re
import shlex
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from megarl.config import load_config
from megarl.config.check import check_sft, check_train
from megarl.config.schema import Config
from megarl.errors import ConfigError, WorkerError

TEMPLATE = Path(__file__).parents[2] / "slurm" / "train.sbatch"
_TIME = re.compile(r"(?:(?P<days>\d+)-)?(?P<parts>\d+(?::\d+){0,2})")


@dataclass(frozen=True, slots=True, kw_only=True)
class SubmitRequest:
    """What to run on which nodes; see `megarl slurm submit --help`."""

    command: str
    config: Path
    overrides: tuple[str, ...]
    num_nodes: int
    gpus_per_node: int
    cpus_per_node: int
    time_limit: str
    signal_s: int
    max_restarts: int
    num_jobs: int = 1
    sbatch_options: tuple[str, ...] = ()


def submit(request: SubmitRequest, *, dry_run: bool = False) -> list[int]:
    """Submit the run, `num_jobs` times in a row if asked for; prints the script instead with `dry_run`.

    Raises:
        ConfigError: what cannot fit: devices, layout, time.
        WorkerError: Slurm refused it.
    """
    script = job_script(request)
    if dry_run:
        print(script, end="")
        return []
    jobs: list[int] = []
    for _ in range(request.num_jobs):
        # Each continues the last checkpoint of the one before, however that ended.
        after = [f"--dependency=afterany:{jobs[-1]}"] if jobs else []
        done = subprocess.run(["sbatch", "--parsable", *after], input=script, capture_output=True, text=True)
        if done.returncode:
            raise WorkerError(f"sbatch refused the job: {done.stderr.strip()}")
        jobs.append(int(done.stdout.split(";")[0]))
        print(f"submitted job {jobs[-1]}")
    return jobs


def job_script(request: SubmitRequest) -> str:
    """slurm/train.sbatch with the request's options and arguments. Raises ConfigError; see `submit`."""
    if request.num_nodes < 1 or request.cpus_per_node < 1 or request.num_jobs < 1:
        raise ConfigError("megarl slurm submit: --nodes, --cpus-per-node and --chain: expected at least 1")
    limit_s = seconds_of(request.time_limit)
    if limit_s <= 2 * request.signal_s:
        raise ConfigError(
            f"--time: got {request.time_limit} ({limit_s} s), but the last checkpoint begins --signal-s="
            f"{request.signal_s} s before the limit, which leaves too little to train; raise --time or lower --signal-s"
        )
    config = load_config(request.config, request.overrides)
    placed = [*request.overrides, *node_overrides(config, request)]
    _CHECKS[request.command](load_config(request.config, placed))
    options = {
        "job-name": config.run.name,
        "nodes": str(request.num_nodes),
        "gpus-per-node": str(request.gpus_per_node) if request.gpus_per_node else None,
        "cpus-per-task": str(request.cpus_per_node),
        "time": request.time_limit,
        "signal": f"B:USR1@{request.signal_s}",
    }
    text = TEMPLATE.read_text()
    for name, value in options.items():
        text = _with_option(text, name, value)
    more = "".join(f"#SBATCH {option}\n" for option in request.sbatch_options)
    text = text.replace("set -euo pipefail\n", f"{more}set -euo pipefail\n", 1)
    text = text.replace('"${MEGARL_MAX_RESTARTS:-3}"', str(request.max_restarts))
    text = text.replace('"${MEGARL_COMMAND:-train}"', request.command)
    arguments = shlex.join([str(request.config), *placed])
    return text.replace('"$@"', arguments)


# What each command that the script can run asks of a configuration.
_CHECKS = {"train": check_train, "sft": check_sft}


def _with_option(text: str, name: str, value: str | None) -> str:
    """The script with an option of sbatch set, or without it."""
    line = re.compile(rf"^#SBATCH --{name}=.*\n", re.MULTILINE)
    assert line.search(text), f"{TEMPLATE} has no --{name}"
    return line.sub("" if value is None else f"#SBATCH --{name}={value}\n", text)


def node_overrides(config: Config, request: SubmitRequest) -> list[str]:
    """Settings that spread a run over the request's nodes. Raises ConfigError where it does not fit."""
    # Without GPUs a rank takes a CPU.
    per_node = request.gpus_per_node or request.cpus_per_node
    what = "GPUs" if request.gpus_per_node else "CPUs"
    layout, engine = config.actor.layout, config.rollout.engine
    for key, tp in (("actor.layout.tp", layout.tp), ("rollout.engine.tp", engine.tp)):
        if tp > per_node:
            raise ConfigError(
                f"{key}: got {tp}, but a node has {per_node} {what}, and tensor parallelism over the network between "
                f"nodes is too slow; lower it, and raise pp or dp instead"
            )
    needs = {"placement.trainer": layout.world_size}
    if request.command == "train" and config.placement.mode == "split":
        needs["placement.engines"] = engine.num_engines * engine.tp
    nodes = _nodes_of(needs, request.num_nodes, per_node, what)
    return [f"{where}.num_nodes={count}" for where, count in nodes.items()]


def _nodes_of(needs: Mapping[str, int], num_nodes: int, per_node: int, what: str) -> dict[str, int]:
    """The nodes of each group: as few as hold its devices; a single group takes all."""
    fewest = {where: -(-count // per_node) for where, count in needs.items()}
    if len(needs) == 1:
        (where,) = needs
        fewest[where] = max(fewest[where], num_nodes)
    if sum(fewest.values()) != num_nodes:
        wanted = ", ".join(f"{count} {what} ({fewest[where]} nodes) for {where}" for where, count in needs.items())
        raise ConfigError(
            f"--nodes: got {num_nodes} with {per_node} {what} each, but the run needs {wanted}; change --nodes, "
            f"actor.layout or rollout.engine"
        )
    for where, count in needs.items():
        if count % fewest[where]:
            raise ConfigError(
                f"--nodes: the {count} processes of {where} do not divide evenly over {fewest[where]} nodes; change "
                f"--nodes, actor.layout or rollout.engine"
            )
    return fewest


def seconds_of(limit: str) -> int:
    """A time limit of Slurm (minutes, MM:SS, HH:MM:SS, D-HH, D-HH:MM, D-HH:MM:SS) in seconds."""
    found = _TIME.fullmatch(limit)
    if found is None:
        raise ConfigError(f"--time: got {limit!r}, expected Slurm's form, such as 24:00:00 or 2-00:00:00")
    parts = [int(part) for part in found["parts"].split(":")]
    if found["days"] is not None:
        hours, minutes, seconds = [*parts, 0, 0][:3]
        return ((int(found["days"]) * 24 + hours) * 60 + minutes) * 60 + seconds
    if len(parts) == 1:
        return parts[0] * 60
    hours, minutes, seconds = parts if len(parts) == 3 else [0, *parts]
    return (hours * 60 + minutes) * 60 + seconds
