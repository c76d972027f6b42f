"""Read from a megarl command line what its Slurm job needs: the output directory and the Ray settings."""

from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from megarl.cluster.object_store import object_store, routing_bytes
from megarl.config import load_config
from megarl.config.batches import pass_bytes
from megarl.config.check import TRAINING_CHECKS
from megarl.config.derived import filled
from megarl.config.load import with_overrides
from megarl.config.schema import ClusterConfig, Config
from megarl.errors import ConfigError
from megarl.host.sharing import Share
from megarl.launch.allocation import HostGroup
from megarl.record.metrics import RunPaths


@dataclass(frozen=True, slots=True, kw_only=True)
class JobCommand:
    """A command line of megarl, the directory that it writes to, and the settings of its Ray cluster.

    share: who may read the directory, see `run.share`. num_nodes: for a run whose engines have nodes of their own, the
    number of nodes by setting, the trainer's first. environment_nodes: those of environments, which come last.
    """

    argv: tuple[str, ...]
    directory: Path
    cluster: ClusterConfig
    share: Share | None = None
    num_nodes: Mapping[str, int] = field(default_factory=dict)
    environment_nodes: int = 0

    @property
    def logs(self) -> Path:
        """Return the directory of the logs of all jobs that run this command."""
        return (self.directory / "logs").resolve()

    def on(self, address: str, groups: Sequence[HostGroup]) -> list[str]:
        """Return the command line with settings added that make it join the Ray cluster at `address`, on the hosts of
        these components of the job.
        """
        hosts = ", ".join(host for group in groups for host in group.hosts)
        own = self.environment_group(groups)
        # Some may have been lost.
        left = [] if own is None else [f"environment.nodes={len(own.hosts)}"]
        return [*self.argv, f"cluster.address={address}", f"cluster.hosts=[{hosts}]", *left]

    def environment_group(self, groups: Sequence[HostGroup]) -> HostGroup | None:
        """Return the component of a job that is for environments alone, if one is."""
        return groups[-1] if self.environment_nodes and len(groups) > 1 else None

    def goes_on(self, groups: Sequence[HostGroup], lost: Sequence[str]) -> bool:
        """Return whether a job of these components can start the run again without lost hosts: in a heterogeneous one,
        only nodes of environments take over from each other.
        """
        own = self.environment_group(groups)
        return own is None or {*lost} < {*own.hosts}

    def check_components(self, groups: Sequence[HostGroup]) -> None:
        """Raise ConfigError if `groups` are the components of a heterogeneous job that does not suit the run.

        The run takes the hosts in their order, so with other numbers of nodes it would mix the components up.
        """
        if len(groups) == 1:
            return
        wanted: list[tuple[str, int] | None] = [*self.num_nodes.items()] or [None]
        if self.environment_nodes:
            # The nodes of trainer and engines may be alike.
            wanted = [*(wanted if len(groups) > 2 else [None]), ("environment.nodes", self.environment_nodes)]
        if len(groups) != len(wanted):
            raise ConfigError(
                f"megarl slurm run: got a heterogeneous job of {len(groups)} components, but a run uses "
                f"{len(wanted)} here: the trainer's nodes, then the engines' with `megarl train` and "
                "placement.mode=split, then those of environment.nodes; set that, or submit another kind of job"
            )
        for i, (each, group) in enumerate(zip(wanted, groups, strict=True)):
            if each is not None and each[1] != len(group.hosts):
                setting, num_hosts = each[0], len(group.hosts)
                raise ConfigError(
                    f"{setting}: got {each[1]}, but component {i} of this heterogeneous job has {num_hosts} node(s): "
                    f"{', '.join(group.hosts)}; pass {setting}={num_hosts}, or change that component's --nodes"
                )


def read_command(argv: Sequence[str], arguments: Namespace) -> JobCommand:
    """Check a command line of a training or an evaluation, and return it. Raises ConfigError if it is bad."""
    num_nodes, environment_nodes = dict[str, int](), 0
    if arguments.command in TRAINING_CHECKS:
        config = load_config(arguments.config, arguments.overrides)
        directory = RunPaths.of(config.run).root
        placement = config.placement
        if arguments.command == "train":
            environment_nodes = config.environment.nodes
        if arguments.command == "train" and placement.mode == "split":
            groups = {"trainer": placement.trainer, "engines": placement.engines}
            num_nodes = {f"placement.{name}.num_nodes": nodes.num_nodes for name, nodes in groups.items()}
    elif arguments.command == "eval":
        base = Config() if arguments.config is None else load_config(arguments.config)
        config, directory = with_overrides(base, arguments.overrides), arguments.out
    else:
        raise ConfigError(
            f"megarl slurm run: got the command {arguments.command!r}, expected one of "
            f"{', '.join(TRAINING_CHECKS)}, eval; the others use one host: call them in the script itself"
        )
    # The job starts Ray itself, on hosts that are taken to be alike.
    own = replace(config, cluster=replace(config.cluster, address=None))
    passed = pass_bytes(own, arguments.command, routing_bytes(own.model, own.actor.moe))
    cluster = filled(own, [object_store(own.cluster, passed)]).cluster
    return JobCommand(
        argv=tuple(argv),
        directory=directory,
        cluster=cluster,
        share=config.run.share,
        num_nodes=num_nodes,
        environment_nodes=environment_nodes,
    )
