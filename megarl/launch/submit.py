"""Write and submit the job script of a run file, after checking that the run fits the requested nodes."""

import math
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from megarl.config import load_config
from megarl.config.check import TRAINING_CHECKS
from megarl.config.engine import EngineConfig
from megarl.config.environments import EnvironmentConfig
from megarl.config.generation import PlacementConfig
from megarl.config.layout import LayoutConfig
from megarl.config.load import PACKAGED
from megarl.config.rewards import RewardsConfig
from megarl.config.schema import Config
from megarl.config.target import checked_for, named_target
from megarl.errors import ConfigError, DataError, WorkerError
from megarl.host.memory import listed
from megarl.host.streams import print_lines
from megarl.host.unicode import visible
from megarl.launch.allocation import seconds_of, slurm_says

if TYPE_CHECKING:
    from megarl.record.performance import StopForecast

TEMPLATES = PACKAGED.parent / "slurm"
# In a template, the line between the options of two components of a heterogeneous job, and the first line after all.
_ENVIRONMENT = "slurm/env.sh"
_NEXT_COMPONENT, _AFTER_OPTIONS = "#SBATCH hetjob\n", "set -euo pipefail\n"
_GRES = re.compile(r"\bgpu(?::[a-zA-Z][\w.-]*)?(?::(?P<count>\d+))?(?=[,(]|$)")
_MEMORY = re.compile(r"--mem(?P<per>|-per-cpu|-per-gpu)=(?P<number>\d+)(?P<unit>[KMGTkmgt]?)B?")
_PARTITION = re.compile(r"(?:--partition=|-p ?)(\S+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class NodesRequest:
    """A request for a number of equal nodes, with further options of sbatch for them."""

    num_nodes: int
    gpus_per_node: int
    cpus_per_node: int
    sbatch_options: tuple[str, ...] = ()

    @property
    def devices_per_node(self) -> int:
        """Return the number of devices for ranks on each node; without GPUs a rank takes a CPU."""
        return self.gpus_per_node or self.cpus_per_node

    @property
    def gres(self) -> int | None:
        """Return how many GPUs per node an option such as --gres=gpu:h100:8 asks for; None: none does."""
        found = [_GRES.search(option) for option in self.sbatch_options if option.startswith("--gres")]
        return next((int(each["count"] or 1) for each in found if each), None)

    def surviving(self) -> "NodesRequest":
        """Return the request for nodes without which a job goes on when they are lost."""
        return replace(self, sbatch_options=(*self.sbatch_options, "--no-kill"))

    def __str__(self) -> str:
        return f"{self.num_nodes} with {self.devices_per_node} {'GPUs' if self.gpus_per_node else 'CPUs'} each"


Forecast: TypeAlias = Callable[[Config], "StopForecast"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SubmitRequest:
    """The options of `megarl slurm submit`: what to run, on which nodes.

    engine_nodes, environment_nodes: separate nodes for the engines, and for environment workers, which make the job
    heterogeneous; None: there are none. num_spares: further nodes, which a restart uses in place of those that were
    lost. forecast: says how long `train` takes to stop; None: nobody knows.
    """

    command: str
    config: Path
    overrides: tuple[str, ...]
    nodes: NodesRequest
    time_limit: str
    signal_s: int
    max_restarts: int
    num_jobs: int = 1
    engine_nodes: NodesRequest | None = None
    environment_nodes: NodesRequest | None = None
    num_spares: int = 0
    forecast: Forecast | None = None

    @property
    def components(self) -> list[NodesRequest]:
        """List the nodes of each component of the job; that of environments is the last."""
        return [*filter(None, (self.nodes, self.engine_nodes, self.environment_nodes))]


def submit(request: SubmitRequest, *, dry_run: bool = False) -> list[int]:
    """Submit the run as a Slurm job, or as a chain of `num_jobs` jobs; with `dry_run`, print the script instead.

    Raises:
        ConfigError: the run does not fit the nodes, their devices or the time limit; or its environment is not here.
        WorkerError: Slurm refused the job.
    """
    script = job_script(request)
    # A job would wait in the queue, and end at once.
    read = subprocess.run(["/bin/bash", "-n", _ENVIRONMENT], capture_output=True, encoding="utf-8", errors="replace")
    if read.returncode and Path(_ENVIRONMENT).is_file():
        raise ConfigError(f"{next(iter(read.stderr.splitlines()), _ENVIRONMENT)}; correct it, and submit again")
    _check_queue(script, request)
    if dry_run:
        print(script, end="")
        return []
    if not Path(_ENVIRONMENT).is_file():
        raise ConfigError(
            f"{_ENVIRONMENT}: no such file in {Path.cwd()}, where the job starts; copy it with `cp -r {TEMPLATES} .`, "
            "adapt it to the cluster, and submit again"
        )
    jobs: list[int] = []
    for _ in range(request.num_jobs):
        # Each continues the last checkpoint of the one before, however that ended.
        after = [f"--dependency=afterany:{jobs[-1]}"] if jobs else []
        done = slurm_says("sbatch", "--parsable", *after, text=script)
        # A site may print notes of its own.
        found = re.findall(r"^(\d+)(?:;.*)?$", done.stdout, re.MULTILINE)
        if done.returncode or not found:
            raise WorkerError(f"sbatch refused the job: {done.stderr.strip() or done.stdout.strip()}")
        jobs.append(int(found[-1]))
        print_lines(f"submitted job {jobs[-1]}")
    return jobs


def job_script(request: SubmitRequest) -> str:
    """Fill the request's options and arguments into a template of slurm/: train.sbatch, or train_split.sbatch for nodes
    of several kinds. Raises ConfigError; see `submit`.
    """
    asked = request.components
    if request.num_jobs < 1 or any(nodes.num_nodes < 1 or nodes.cpus_per_node < 1 for nodes in asked):
        raise ConfigError("megarl slurm submit: numbers of nodes, of CPUs per node, and --chain: expected at least 1")
    if request.num_spares < 0 or (request.num_spares and len(asked) > 1):
        raise ConfigError(
            f"--spare-nodes: got {request.num_spares}, expected at least 0, and none with --engine-nodes or "
            "--environment-nodes, where nodes of one kind cannot take the places of the other; change either"
        )
    for nodes in asked:
        if nodes.gres not in (None, nodes.gpus_per_node):
            raise ConfigError(
                f"--sbatch: got {nodes.gres} GPUs per node by --gres, but --gpus-per-node={nodes.gpus_per_node} or its "
                "default; make them equal"
            )
        for option in nodes.sbatch_options:
            if not option.startswith("-") or visible(option) != option:
                raise ConfigError(
                    f"--sbatch: got {option!r}, expected an option of sbatch in one line, such as --partition=gpu; "
                    "give each option by an --sbatch of its own"
                )
    limit_s = seconds_of(request.time_limit)
    if limit_s <= 2 * request.signal_s:
        raise ConfigError(
            f"--time: got {request.time_limit} ({limit_s} s), but the last checkpoint begins --signal-s="
            f"{request.signal_s} s before the limit, which leaves too little to train; raise --time or lower --signal-s"
        )
    config = load_config(request.config, request.overrides)
    placed = [
        *request.overrides,
        *_node_overrides(request, config.actor.layout, config.rollout.engine, config.placement, config.rewards),
        *_environment_overrides(request, config.environment),
    ]
    with checked_for(named_target(config.cluster.target, gpus=request.nodes.gpus_per_node > 0)):
        TRAINING_CHECKS[request.command](whole := load_config(request.config, placed))
        _check_signal(request, None if request.forecast is None else partial(request.forecast, whole))
    template = TEMPLATES / ("train.sbatch" if len(asked) == 1 else "train_split.sbatch")
    head, _, text = template.read_text(encoding="utf-8").partition(_AFTER_OPTIONS)
    first, *further = head.split(_NEXT_COMPONENT)
    options = {"job-name": config.run.name, "time": request.time_limit, "signal": f"B:USR1@{request.signal_s}"}
    # Otherwise Slurm ends a job that has lost a node; a heterogeneous one, too, if a component has but one.
    if request.num_spares:
        asked[0] = replace(asked[0].surviving(), num_nodes=asked[0].num_nodes + request.num_spares)
    if request.environment_nodes is not None and min(each.num_nodes for each in asked) > 1:
        asked = [each.surviving() for each in asked]
    filled = [_fill(first, options, asked[0])]
    # Slurm gives further components the options of the whole job.
    filled += [_fill(further[0], {}, nodes) for nodes in asked[1:]]
    text = _NEXT_COMPONENT.join(filled) + _AFTER_OPTIONS + text
    text = text.replace('"${MEGARL_MAX_RESTARTS:-3}"', str(request.max_restarts))
    text = text.replace('"${MEGARL_COMMAND:-train}"', request.command)
    arguments = shlex.join([str(request.config), *placed])
    return text.replace('"$@"', arguments)


def _check_signal(request: SubmitRequest, forecast: "Callable[[], StopForecast] | None") -> None:
    """Raise ConfigError if a run is expected to lose its last step at the time limit; print a warning if it may."""
    if forecast is None or request.command != "train" or not request.nodes.gpus_per_node:
        return
    try:
        stop = forecast()
    except (ConfigError, DataError) as error:
        said = f"warning: --signal-s={request.signal_s}: is not checked, as {error}; make it longer than a step takes"
        print_lines(said, file=sys.stderr)
        return
    _check_memory(request.nodes, stop.host)
    least = math.ceil((stop.step + stop.checkpoint) / 60) * 60
    if request.signal_s >= stop.step + stop.checkpoint:
        return
    said = (
        f"--signal-s: got {request.signal_s}, but a step of this run is expected to take {stop.step:.0f} s, of which a "
        f"signal cuts only the sampling short, and a checkpoint {stop.checkpoint:.0f} s: what they compute when the "
        f"limit comes is lost; set --signal-s={least}"
    )
    if request.signal_s < stop.uncut + stop.checkpoint:
        raise ConfigError(said)
    print_lines(f"warning: {said}", file=sys.stderr)


def _check_memory(nodes: NodesRequest, needs: Mapping[str, int]) -> None:
    """Raise ConfigError if a job asks for less memory on a node than the trainer needs there."""
    for option in nodes.sbatch_options:
        if (found := _MEMORY.fullmatch(option)) is None or not int(found["number"]):
            continue
        times = {"": 1, "-per-cpu": nodes.cpus_per_node, "-per-gpu": nodes.gpus_per_node}[found["per"]]
        asked = int(found["number"]) * times * 1024 ** ("KMGT".index(found["unit"].upper() or "M") + 1)
        if asked < sum(needs.values()):
            raise ConfigError(
                f"--sbatch: got {option}, {asked / 2**30:,.0f} GiB of a node's memory, but this run needs at least "
                f"{listed(needs)}; ask for more, or for a node's whole memory with --mem=0"
            )


def _check_queue(script: str, request: SubmitRequest) -> None:
    """Have Slurm check a job, where it answers. Raises WorkerError for one that it refuses, and ConfigError for a time
    limit above that of a component's partition, for which many a Slurm lets jobs wait for ever.
    """
    if (partitions := slurm_says("sinfo", "--noheader", "--format=%P %l")).returncode:
        return
    if (done := slurm_says("sbatch", "--test-only", text=script)).returncode:
        raise WorkerError(f"sbatch refused the job: {done.stderr.strip() or done.stdout.strip()}")
    # Slurm marks the partition of jobs that name none.
    rows = [line.split() for line in partitions.stdout.splitlines()]
    limits, chosen = {name.rstrip("*"): limit for name, limit in rows}, [x for x, _ in rows if x.endswith("*")]
    for nodes in request.components:
        chosen = [found[1] for each in nodes.sbatch_options if (found := _PARTITION.fullmatch(each))] or chosen
        for name in (each.rstrip("*") for each in chosen):
            limit = limits.get(name, "infinite")
            if limit[:1].isdigit() and seconds_of(limit) < seconds_of(request.time_limit):
                raise ConfigError(
                    f"--time: got {request.time_limit}, but jobs in the partition {name} may take {limit}; lower it"
                )


def _fill(component: str, options: Mapping[str, str], nodes: NodesRequest) -> str:
    """Return a component's #SBATCH lines with these options, and with those of its nodes."""
    sizes = {
        "nodes": str(nodes.num_nodes),
        # Some sites know GPUs as --gres alone, which may stand among the options.
        "gpus-per-node": str(nodes.gpus_per_node) if nodes.gpus_per_node and not nodes.gres else None,
        "cpus-per-task": str(nodes.cpus_per_node),
    }
    for name, value in {**options, **sizes}.items():
        line = re.compile(rf"^#SBATCH --{name}=.*\n", re.MULTILINE)
        assert line.search(component), f"the template has no --{name}"
        filled = "" if value is None else f"#SBATCH --{name}={shlex.quote(value)}\n"
        # `re` would expand what a backslash begins.
        component = line.sub(filled.replace("\\", r"\\"), component)
    return component + "".join(f"#SBATCH {each}\n" for each in nodes.sbatch_options)


def _node_overrides(
    request: SubmitRequest,
    layout: LayoutConfig,
    engine: EngineConfig,
    placement: PlacementConfig,
    rewards: RewardsConfig,
) -> list[str]:
    """Return the settings that distribute a run over the request's nodes. Raises ConfigError if it does not fit."""
    split = request.command == "train" and placement.mode == "split"
    if request.engine_nodes is not None and not split:
        raise ConfigError(
            "--engine-nodes: is set, but only with placement.mode=split (of train) do engines have nodes of their own; "
            "set that, or remove --engine-nodes"
        )
    engine_nodes = request.engine_nodes or request.nodes
    for key, tp, nodes in (
        ("actor.layout.tp", layout.tp, request.nodes),
        ("rollout.engine.tp", engine.tp, engine_nodes),
    ):
        if tp > nodes.devices_per_node:
            raise ConfigError(
                f"{key}: got {tp}, but of the nodes there are {nodes}, and tensor parallelism over the network between "
                f"nodes is too slow; lower it, and raise pp or dp instead"
            )
    engines, needs = engine.num_engines * engine.num_workers, {"placement.trainer": layout.world_size}
    if split and request.engine_nodes is None:
        needs["placement.engines"] = engines
    servers = rewards.judge_servers if request.command == "train" else {}
    needs |= {f"rewards.judge_servers.{name}": server.replicas * server.tp for name, server in servers.items()}
    counts = _nodes_of(needs, request.nodes, "--nodes")
    if split and request.engine_nodes is not None:
        counts |= _nodes_of({"placement.engines": engines}, engine_nodes, "--engine-nodes")
    return [f"{where}.num_nodes={count}" for where, count in counts.items()]


def _environment_overrides(request: SubmitRequest, config: EnvironmentConfig) -> list[str]:
    """Return the setting that spreads environment workers over their nodes. Raises ConfigError if they do not fit."""
    nodes = request.environment_nodes
    if nodes is None:
        if config.nodes:
            raise ConfigError(
                f"environment.nodes: got {config.nodes}, but the job has no nodes for environments; submit it with "
                f"--environment-nodes={config.nodes}, or set environment.nodes=0"
            )
        return []
    if request.command != "train":
        raise ConfigError(f"--environment-nodes: is set, but {request.command} has no environments; remove it")
    placed = replace(config, nodes=nodes.num_nodes)
    placed.check("environment")
    placed.require_cpus(nodes.cpus_per_node, "a node of --environment-nodes")
    return [f"environment.nodes={nodes.num_nodes}"]


def _nodes_of(needs: Mapping[str, int], nodes: NodesRequest, option: str) -> dict[str, int]:
    """Return how many nodes each group of processes gets: as few as possible, or all nodes for a single group."""
    fewest = {where: -(-count // nodes.devices_per_node) for where, count in needs.items()}
    if len(needs) == 1:
        (where,) = needs
        fewest[where] = max(fewest[where], nodes.num_nodes)
    if sum(fewest.values()) != nodes.num_nodes:
        what = "GPUs" if nodes.gpus_per_node else "CPUs"
        wanted = ", ".join(f"{count} {what} ({fewest[where]} nodes) for {where}" for where, count in needs.items())
        raise ConfigError(
            f"{option}: got {nodes}, but the run needs {wanted}; change {option}, actor.layout or rollout.engine"
        )
    for where, count in needs.items():
        if count % fewest[where]:
            raise ConfigError(
                f"{option}: the {count} processes of {where} do not divide evenly over {fewest[where]} nodes; change "
                f"{option}, actor.layout or rollout.engine"
            )
    return fewest
