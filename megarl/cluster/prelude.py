"""Start what takes long before the cluster can start: a janitor, and imports of libraries."""

import os
import secrets
from typing import Self

from megarl.config.schema import ClusterConfig, RunConfig
from megarl.host.child_environment import SAFE_PATH, require_assertions, without_proxy_here
from megarl.host.device.platform import apply_environment, platform
from megarl.host.fork_server import ForkServers
from megarl.host.janitor import HOSTED_RUN_VARIABLE, HostedRun, Janitor
from megarl.host.peers import SECRET_VARIABLE
from megarl.host.ray_environment import RAY_ENVIRONMENT
from megarl.host.sharing import umask_variable


class Prelude:
    """The janitor of a run, the environment of its processes, and the servers that fork ranks and engines.

    The servers import libraries while this process still reads the model and the data. They exist where this process
    starts Ray itself, on CPUs: no process may be forked from one that has touched a GPU, as Megatron and vLLM may when
    they are imported there.
    """

    def __init__(
        self, cluster: ClusterConfig, run: RunConfig, *, with_trainer: bool = True, with_engine: bool = True
    ) -> None:
        require_assertions()
        os.environ.update(here := without_proxy_here())
        # On several hosts, every one has its own environment, set where Ray was started.
        own = apply_environment() if cluster.address is None else {}
        self.environment = {
            **own,
            "PYTHONWARNINGS": "ignore",
            **SAFE_PATH,
            **here,
            **umask_variable(run.share),
            SECRET_VARIABLE: secrets.token_hex(32),
        }
        os.environ.update({k: v for k, v in RAY_ENVIRONMENT.items() if k not in os.environ})
        # The hosts of a run that others have started have janitors already.
        run_id = os.environ.get(HOSTED_RUN_VARIABLE)
        self.janitor: Janitor | HostedRun = Janitor() if run_id is None else HostedRun(run_id)
        if cluster.address is None:
            # Libraries leave files in the temporary directory; the run's own is removed as a whole.
            self.environment["TMPDIR"] = str(self.janitor.temp_dir)
        kinds = [kind for kind, wanted in {"rank": with_trainer, "engine": with_engine}.items() if wanted]
        self._servers: ForkServers | None = None
        if kinds and cluster.address is None and self.janitor.temp_dir is not None and platform().name == "cpu":
            self._servers = ForkServers(self.janitor.temp_dir, "megarl.cluster.preload", kinds, self.environment)
        self._is_closed = False

    def runtime_envs(self) -> dict[str, dict[str, object]]:
        """Return Ray's runtime environments of ranks and engines that are forked, by kind."""
        return {} if self._servers is None else self._servers.runtime_envs()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End every process of the run; a second call does nothing."""
        if not self._is_closed:
            self._is_closed = True
            if self._servers is not None:
                self._servers.close()
            self.janitor.close()
