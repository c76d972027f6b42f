"""Ray, the trainer's ranks and the engines of a run."""

import contextlib
import math
import os
import shutil
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import ray
from ray.exceptions import ActorDiedError, ActorUnavailableError, GetTimeoutError, RayTaskError

from megarl.cluster.actors import EngineActor, RankActor
from megarl.cluster.engines import EngineGroup
from megarl.cluster.processes import locate, wait_all
from megarl.cluster.replication import weight_transport
from megarl.cluster.workers import WorkerGroup
from megarl.config.schema import Config
from megarl.errors import ConfigError, RunStopped
from megarl.janitor import Janitor
from megarl.parallel.platform import apply_environment, platform
from megarl.placement import PlacementPlan, Reservation, Seat, plan_placement
from megarl.rollout.engine import engine_spec
from megarl.rollout.transport import WeightTransport
from megarl.signals import keep_handlers

RAY_ENVIRONMENT = {
    # A token file left by another cluster would break the workers.
    "RAY_AUTH_MODE": "disabled",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",
}
CLOSE_TIMEOUT_S = 10.0


class Cluster:
    """Ray, the trainer's ranks and (with `with_engine`) the engines of one layout."""

    def __init__(self, config: Config, *, with_engine: bool = True, log_dir: Path | None = None) -> None:
        self._config, self._log_dir = config, log_dir
        environment = apply_environment() | {"PYTHONWARNINGS": "ignore"}
        os.environ.update({k: v for k, v in RAY_ENVIRONMENT.items() if k not in os.environ})
        self._janitor = Janitor()
        self.scope = self._janitor.scope
        # Libraries leave files in the temporary directory; the run's own is removed as a whole.
        environment["TMPDIR"] = str(self.scope.temp_dir)
        self.engines = EngineGroup([], timeout_s=0)
        self.workers = WorkerGroup([], layout=config.actor.layout, timeout_s=0)
        try:
            self._start(environment, with_engine)
        except BaseException:
            self.close(failed=True)
            raise

    def check_serves(self, config: Config) -> None:
        """ConfigError unless a run with this configuration can use these processes."""
        ours, theirs = self._config, config
        differing = [
            name
            for name, a, b in (
                ("actor.layout", ours.actor.layout, theirs.actor.layout),
                ("placement", ours.placement, theirs.placement),
                ("model.dtype", ours.model.dtype, theirs.model.dtype),
                ("rollout.engine", ours.rollout.engine, theirs.rollout.engine),
            )
            if a != b
        ]
        if engine_spec(theirs).max_model_tokens > engine_spec(ours).max_model_tokens:
            differing.append("rollout.engine.max_model_tokens")
        if differing:
            raise ConfigError(f"this cluster was started with another {', '.join(differing)}; start one for this run")

    def _start(self, environment: dict[str, str], with_engine: bool) -> None:
        cluster = self._config.cluster
        plan = plan_placement(self._config, platform().device_resources(), with_engines=with_engine)
        with keep_handlers():
            ray.init(
                address="local",
                # Logical CPUs only decide placement: ranks and engines may share a core.
                num_cpus=cluster.num_cpus or max(os.cpu_count() or 1, math.ceil(plan.num_cpus)),
                object_store_memory=cluster.object_store_mib << 20,
                include_dashboard=False,
                log_to_driver=False,
                logging_level="error",
                _temp_dir=str(self.scope.temp_dir),
                runtime_env={"env_vars": environment},
            )
        self._create_processes(plan)
        # Engines take longest: start them first, wait for them last.
        engines = [
            (p, p.actor.start.remote(engine_spec(self._config), self._shared_devices(seat)))
            for p, seat in zip(self.engines.processes, plan.engines, strict=True)
        ]
        self.pids = self._join_ranks()
        started = wait_all(engines, timeout_s=cluster.start_timeout_s, doing="starting the engines")
        for process, (pid, *workers) in zip(self.engines.processes, started, strict=True):
            self.pids |= {process.name: pid} | {f"{process.name} worker {i}": w for i, w in enumerate(workers)}

    def _create_processes(self, plan: PlacementPlan) -> None:
        reservation = Reservation(plan, timeout_s=self._config.cluster.start_timeout_s)

        def create(cls: type, seat: Seat, *args: Any) -> Any:
            return ray.remote(cls).options(**reservation.options(seat)).remote(*args)

        actors = {f"trainer rank {i}": create(RankActor, seat, i) for i, seat in enumerate(plan.ranks)}
        actors |= {f"engine {i}": create(EngineActor, seat) for i, seat in enumerate(plan.engines)}
        processes = locate(actors, timeout_s=self._config.cluster.start_timeout_s)
        num_ranks, timeout_s = len(plan.ranks), self._config.rollout.timeout_s
        self.workers = WorkerGroup(processes[:num_ranks], layout=self._config.actor.layout, timeout_s=timeout_s)
        self.engines = EngineGroup(processes[num_ranks:], timeout_s=timeout_s)

    def _shared_devices(self, seat: Seat) -> list[str]:
        ranks = self.workers.processes
        return [device for rank in seat.shares for device in ranks[rank].location.device_ids]

    def _join_ranks(self) -> dict[str, int]:
        """Process ids of the ranks, once they have formed their process groups."""
        cluster, layout, ranks = self._config.cluster, self._config.actor.layout, self.workers.processes
        timeout_s = cluster.start_timeout_s
        prepared = [(p, p.actor.call.remote("prepare")) for p in ranks]
        address = wait_all(prepared, timeout_s=timeout_s, doing="starting the trainer")[0]
        joins = [(p, p.actor.call.remote("join", layout, address, cluster.collective_timeout_s)) for p in ranks]
        pids = wait_all(joins, timeout_s=timeout_s, doing="joining process groups")
        return dict(zip((p.name for p in ranks), pids, strict=True))

    def weight_transport(self, path: Path) -> WeightTransport:
        """What carries a weight file at `path` from the ranks to the engines."""
        processes = [*self.workers.processes, *self.engines.processes]
        return weight_transport(processes, path, timeout_s=self._config.rollout.timeout_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(failed=error is not None and not isinstance(error, RunStopped))

    def close(self, *, failed: bool = False) -> None:
        """End every process of the run; after a failure the workers' logs are kept under RUN/logs first."""
        try:
            if ray.is_initialized():
                if not failed:
                    self._close_actors()
                elif self._log_dir is not None:
                    self._keep_logs(self._log_dir)
        finally:
            ray.shutdown()
            self._janitor.close()

    def _close_actors(self) -> None:
        processes = [*self.workers.processes, *self.engines.processes]
        refs = [p.actor.call.remote("close") for p in processes]
        with contextlib.suppress(RayTaskError, ActorDiedError, ActorUnavailableError, GetTimeoutError):
            ray.get(refs, timeout=CLOSE_TIMEOUT_S)

    def _keep_logs(self, target: Path) -> None:
        source = self.scope.temp_dir / "session_latest" / "logs"
        target.mkdir(parents=True, exist_ok=True)
        for file in source.glob("worker-*"):
            if file.stat().st_size:
                shutil.copy(file, target / file.name)
