"""Rules of the Ray cluster that a run joins."""

import re

from megarl.config.schema import Config
from megarl.errors import ConfigError

_ADDRESS = re.compile(r"[^:\s]+:[0-9]+")


def check_cluster(config: Config) -> None:
    """An address has a port, and hosts are those of a cluster that is joined."""
    cluster = config.cluster
    if cluster.address is not None and not _ADDRESS.fullmatch(cluster.address):
        raise ConfigError(f"cluster.address: got {cluster.address!r}, expected HOST:PORT of a running Ray cluster")
    if cluster.hosts and cluster.address is None:
        raise ConfigError(
            "cluster.hosts: is set, but without cluster.address Ray is started on this host alone; set "
            "cluster.address=HOST:PORT, or remove it"
        )
