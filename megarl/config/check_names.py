"""Check the texts of a configuration that become names of files, lines of scripts and addresses of hosts."""

import re

from megarl.config.schema import Config
from megarl.errors import ConfigError
from megarl.texts.unicode import visible

# Letters and digits of any script. No text of these can end a line, leave its directory, be taken for an option, or,
# once it is quoted, mean something to a shell, to Slurm (%) or to a format string.
_NAME = re.compile(r"\w(?:[\w .,+=@~()-]*[\w.,+=@~()-])?")
_HOST = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
_ADDRESS = re.compile(rf"{_HOST.pattern}:[0-9]+")


def require_run_name(name: str) -> None:
    """Raise ConfigError if a run's name is no plain name of a directory."""
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"run.name: got {name!r}, expected a single directory name of letters, digits, spaces and .,+=@~()_- that "
            "begins with a letter, a digit or _, and does not end with a space"
        )


def check_names(config: Config) -> None:
    """Raise ConfigError if the run's name, directory or hosts have characters that no such name has."""
    require_run_name(config.run.name)
    if visible(config.run.dir) != config.run.dir:
        raise ConfigError(f"run.dir: got {config.run.dir!r}, expected a path without control characters")
    cluster = config.cluster
    if cluster.address is not None and not _ADDRESS.fullmatch(cluster.address):
        raise ConfigError(f"cluster.address: got {cluster.address!r}, expected HOST:PORT of a running Ray cluster")
    for host in cluster.hosts:
        if not _HOST.fullmatch(host):
            raise ConfigError(f"cluster.hosts: got {host!r}, expected names of hosts, of letters, digits and ._-")
