"""The megarl command that a job runs: what the job needs to know of it."""

from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megarl.config import load_config
from megarl.config.load import with_overrides
from megarl.config.schema import ClusterConfig, Config
from megarl.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class JobCommand:
    """A command line, the directory of what it writes, and the settings of its Ray."""

    argv: tuple[str, ...]
    directory: Path
    cluster: ClusterConfig

    @property
    def logs(self) -> Path:
        """Of all jobs that run this command."""
        return (self.directory / "logs").resolve()

    def on(self, address: str, hosts: Sequence[str]) -> list[str]:
        """The command line on a Ray cluster."""
        return [*self.argv, f"cluster.address={address}", f"cluster.hosts=[{', '.join(hosts)}]"]


def read_command(argv: Sequence[str], arguments: Namespace) -> JobCommand:
    """Check a command line of train, sft or eval, and its arguments. Raises ConfigError before anything has started."""
    reader = _READERS.get(arguments.command)
    if reader is None:
        raise ConfigError(
            f"megarl slurm run: got the command {arguments.command!r}, expected {', '.join(_READERS)}; the others use "
            f"one host: call them in the script itself"
        )
    directory, cluster = reader(arguments)
    return JobCommand(argv=tuple(argv), directory=directory, cluster=cluster)


def _read_run(arguments: Namespace) -> tuple[Path, ClusterConfig]:
    config = load_config(arguments.config, arguments.overrides)
    return Path(config.run.dir) / config.run.name, config.cluster


def _read_eval(arguments: Namespace) -> tuple[Path, ClusterConfig]:
    base = Config() if arguments.config is None else load_config(arguments.config)
    return arguments.out, with_overrides(base, arguments.overrides).cluster


_READERS: Mapping[str, Callable[[Namespace], tuple[Path, ClusterConfig]]] = {
    "train": _read_run,
    "sft": _read_run,
    "eval": _read_eval,
}
