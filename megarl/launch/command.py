"""Read from a megarl command line what its Slurm job needs: the output directory and the Ray settings."""

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megarl.config import load_config
from megarl.config.check import TRAINING_CHECKS
from megarl.config.load import with_overrides
from megarl.config.schema import ClusterConfig, Config
from megarl.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class JobCommand:
    """A command line of megarl, the directory that it writes to, and the settings of its Ray cluster."""

    argv: tuple[str, ...]
    directory: Path
    cluster: ClusterConfig

    @property
    def logs(self) -> Path:
        """Return the directory of the logs of all jobs that run this command."""
        return (self.directory / "logs").resolve()

    def on(self, address: str, hosts: Sequence[str]) -> list[str]:
        """Return the command line with settings added that make it join the Ray cluster at `address`."""
        return [*self.argv, f"cluster.address={address}", f"cluster.hosts=[{', '.join(hosts)}]"]


def read_command(argv: Sequence[str], arguments: Namespace) -> JobCommand:
    """Check a command line of a training or an evaluation, and return it. Raises ConfigError if it is bad."""
    if arguments.command in TRAINING_CHECKS:
        config = load_config(arguments.config, arguments.overrides)
        directory = Path(config.run.dir) / config.run.name
    elif arguments.command == "eval":
        base = Config() if arguments.config is None else load_config(arguments.config)
        config, directory = with_overrides(base, arguments.overrides), arguments.out
    else:
        raise ConfigError(
            f"megarl slurm run: got the command {arguments.command!r}, expected one of "
            f"{', '.join(TRAINING_CHECKS)}, eval; the others use one host: call them in the script itself"
        )
    return JobCommand(argv=tuple(argv), directory=directory, cluster=config.cluster)
