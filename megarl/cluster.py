"""The processes of a run: Ray, the trainer's ranks, the engines. Built before trainers, and shared by several.

    with Cluster(config) as cluster:
        Trainer(open_train_inputs(config), cluster, RunRecorder(config)).fit()

Ray actors are thin wrappers: the work is in `parallel.worker` and `rollout.engine`.
"""

import contextlib
import functools
import os
import shutil
import signal
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import ray
from ray.exceptions import ActorDiedError, ActorUnavailableError, GetTimeoutError, RayTaskError
from ray.util.placement_group import PlacementGroup, placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from megarl.config.schema import Config
from megarl.errors import ConfigError, WorkerError
from megarl.janitor import Janitor
from megarl.parallel.messages import LoadRequest, Role, StoreResult, UpdateRequest, UpdateResult
from megarl.parallel.platform import apply_environment, platform
from megarl.parallel.worker import PolicyWorker
from megarl.rollout.engine import Completion, EngineSpec, GenerationRequest, VllmEngine, engine_spec
from megarl.types import FloatArray, Row

RAY_ENVIRONMENT = {
    # A token file left by another cluster would break the workers.
    "RAY_AUTH_MODE": "disabled",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",
}
ROWS_PER_SHARD = 64
# How long to look for the cause once a rank failed: its peers fail too, with less telling errors.
CAUSE_WAIT_S = 2.0
CLOSE_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RowShards:
    """Rows of a batch in Ray's object store, in shards, so that a rank fetches only those it works on."""

    refs: tuple[Any, ...]
    rows_per_shard: int

    def fetch(self, micro_batches: Iterable[Iterable[int]]) -> dict[int, Row]:
        """The rows that some micro-batches name, by their index in the batch."""
        wanted = sorted({i for batch in micro_batches for i in batch})
        shards = sorted({i // self.rows_per_shard for i in wanted})
        loaded = dict(zip(shards, ray.get([self.refs[s] for s in shards]), strict=True))
        return {i: loaded[i // self.rows_per_shard][i % self.rows_per_shard] for i in wanted}


def put_rows(rows: Sequence[Row]) -> RowShards:
    """Place rows in the object store."""
    starts = range(0, len(rows), ROWS_PER_SHARD)
    refs = tuple(ray.put(list(rows[start : start + ROWS_PER_SHARD])) for start in starts)
    return RowShards(refs=refs, rows_per_shard=ROWS_PER_SHARD)


class _RankActor:
    """One trainer rank in a Ray actor: synchronous, so that Megatron stays on the actor's main thread."""

    def __init__(self, rank: int) -> None:
        self.worker = PolicyWorker(rank)

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.worker, method)(*args, **kwargs)

    def call_with_rows(
        self, method: str, shards: RowShards, micro_batches: Sequence[Sequence[int]], *args: Any, **kwargs: Any
    ) -> Any:
        rows = shards.fetch(micro_batches)
        bound = getattr(self.worker, method)
        return bound(rows, micro_batches, *args, **kwargs)


class _EngineActor:
    """One engine in a Ray actor."""

    def __init__(self, spec: EngineSpec) -> None:
        self.engine = VllmEngine(spec)

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.engine, method)(*args, **kwargs)


@dataclass(frozen=True, slots=True)
class Process:
    """A remote process of the run and how messages name it."""

    name: str
    actor: Any


def wait_all(calls: Sequence[tuple[Process, Any]], *, timeout_s: float, doing: str) -> list[Any]:
    """Results of remote calls in order. The first failure ends the wait: peers would hang in a collective.

    Raises:
        WorkerError: a process died, is unreachable, or the calls did not finish in time.
        Exception: whatever megarl or the libraries raised in a process, preferring megarl's own errors.
    """
    names = {ref: process.name for process, ref in calls}
    pending, deadline = [ref for _, ref in calls], time.monotonic() + timeout_s
    while pending:
        done, pending = ray.wait(pending, timeout=max(0.0, deadline - time.monotonic()))
        if not done:
            late = ", ".join(names[ref] for ref in pending)
            raise WorkerError(f"{doing}: no answer from {late} within {timeout_s:.0f} s; see RUN/logs")
        for ref in done:
            if (error := _failure(ref)) is not None:
                raise _cause(error, ref, pending, names, doing)
    return ray.get([ref for _, ref in calls])


def _failure(ref: Any) -> Exception | None:
    try:
        ray.get(ref, timeout=0)
    except (RayTaskError, ActorDiedError, ActorUnavailableError) as error:
        return error
    except GetTimeoutError:
        return None
    return None


def _cause(error: Exception, ref: Any, pending: Sequence[Any], names: Mapping[Any, str], doing: str) -> Exception:
    """The failure to report: a dead process, then megarl's own errors, then whatever came first."""
    done, _ = ray.wait(list(pending), num_returns=len(pending), timeout=CAUSE_WAIT_S) if pending else ([], [])
    failures = [(ref, error), *((r, e) for r in done if (e := _failure(r)) is not None)]
    for failed, failure in failures:
        if isinstance(failure, ActorDiedError | ActorUnavailableError):
            return WorkerError(f"{doing}: {names[failed]} died{_last_words(failure)}; see RUN/logs")
    causes = [getattr(failure, "cause", failure) for _, failure in failures]
    own = [cause for cause in causes if type(cause).__module__.startswith("megarl")]
    if own:
        return own[0]
    return WorkerError(f"{doing}: {names[ref]} failed with {type(causes[0]).__name__}: {causes[0]}; see RUN/logs")


def _last_words(failure: Exception) -> str:
    """What an actor that failed while it was made had to say; nothing for a killed one."""
    text = str(failure)
    return f": {text.strip().splitlines()[-1].strip()}" if "creation task" in text else ""


class WorkerGroup:
    """The trainer's ranks under one layout, called together."""

    def __init__(self, processes: Sequence[Process], *, tp: int, timeout_s: float) -> None:
        self.processes, self._tp, self._timeout_s = list(processes), tp, timeout_s

    @property
    def dp(self) -> int:
        return len(self.processes) // self._tp

    def load(self, request: LoadRequest) -> None:
        """Start a run on these ranks: models, optimizer, weights."""
        self._call("load", request, doing="loading the model")

    def score(
        self,
        role: Role,
        rows: Sequence[Row],
        plan: Sequence[Sequence[Sequence[int]]],
        *,
        temperature: float,
        step: int,
    ) -> list[FloatArray]:
        """Log-probs of all rows in order; `plan[dp][micro_batch]` lists row indices."""
        shards = put_rows(rows)
        results = self._call_with_rows(
            "score", shards, plan, doing=f"scoring with the {role}", role=role, temperature=temperature, step=step
        )
        merged = {i: a for r in results if r is not None for i, a in r.logprobs.items()}
        return [merged[i] for i in range(len(rows))]

    def update(
        self, rows: Sequence[Row], plan: Sequence[Sequence[Sequence[int]]], request: UpdateRequest
    ) -> UpdateResult:
        """One optimizer step on a mini-batch."""
        shards = put_rows(rows)
        results = self._call_with_rows("update", shards, plan, doing="updating the actor", request=request)
        reported: list[UpdateResult] = [r for r in results if r is not None]
        logprobs = {i: a for r in reported for i, a in r.logprobs.items()}
        return UpdateResult(metrics=reported[0].metrics, logprobs=logprobs)

    def store_weights(self, files: Sequence[Path], *, with_checksums: bool = False) -> StoreResult:
        """Every rank writes its own slices into preallocated files."""
        paths = [str(f) for f in files]
        parts = self._call("store_weights", paths, with_checksums=with_checksums, doing="writing weights")
        return functools.reduce(StoreResult.merged, parts)

    def _call(self, method: str, *args: Any, doing: str, **kwargs: Any) -> list[Any]:
        calls = [(p, p.actor.call.remote(method, *args, **kwargs)) for p in self.processes]
        return wait_all(calls, timeout_s=self._timeout_s, doing=doing)

    def _call_with_rows(
        self,
        method: str,
        shards: RowShards,
        plan: Sequence[Sequence[Sequence[int]]],
        *,
        doing: str,
        **kwargs: Any,
    ) -> list[Any]:
        # Megatron's default order: tensor-parallel ranks are neighbours.
        calls = [
            (p, p.actor.call_with_rows.remote(method, shards, plan[rank // self._tp], **kwargs))
            for rank, p in enumerate(self.processes)
        ]
        return wait_all(calls, timeout_s=self._timeout_s, doing=doing)


class EngineGroup:
    """The engines, each holding a full copy of the policy; requests are dealt out in turn."""

    def __init__(self, processes: Sequence[Process], *, timeout_s: float) -> None:
        self.processes, self._timeout_s = list(processes), timeout_s

    def submit(self, requests: Sequence[GenerationRequest]) -> list[tuple[Process, Any]]:
        """Start generating; engine i takes requests i, i + num_engines, …"""
        count = len(self.processes)
        return [(p, p.actor.call.remote("generate", list(requests[i::count]))) for i, p in enumerate(self.processes)]

    def collect(self, calls: Sequence[tuple[Process, Any]], *, timeout_s: float) -> list[Completion]:
        """Completions in request order."""
        parts = wait_all(calls, timeout_s=timeout_s, doing="generating")
        merged: list[Completion | None] = [None] * sum(len(part) for part in parts)
        for i, part in enumerate(parts):
            merged[i :: len(parts)] = part
        return [c for c in merged if c is not None]

    def load_weights(self, files: Sequence[Path], *, version: int, with_checksums: bool) -> list[dict[str, int]]:
        """Reload every engine from the same files; returns each one's checksums."""
        paths = [str(f) for f in files]
        calls = [
            (p, p.actor.call.remote("load_weights", paths, version=version, with_checksums=with_checksums))
            for p in self.processes
        ]
        return wait_all(calls, timeout_s=self._timeout_s, doing="syncing weights")

    def prompt_logprobs(self, sequences: Sequence[Sequence[int]]) -> list[FloatArray]:
        """The first engine's log-probs of given sequences (temperature 1)."""
        first = self.processes[0]
        call = first.actor.call.remote("prompt_logprobs", [list(s) for s in sequences])
        return wait_all([(first, call)], timeout_s=self._timeout_s, doing="scoring with the engine")[0]


@contextlib.contextmanager
def _keep_sigterm_handler() -> Iterator[None]:
    """Ray's own handler would end the driver with another exit code, or by abort."""
    handler = signal.getsignal(signal.SIGTERM)
    yield
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, handler)


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
        self.workers = WorkerGroup([], tp=1, timeout_s=0)
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
        cluster, layout = self._config.cluster, self._config.actor.layout
        num_bundles = layout.world_size
        with _keep_sigterm_handler():
            ray.init(
                address="local",
                # Logical CPUs only decide placement: ranks and engines may share a core.
                num_cpus=cluster.num_cpus or max(os.cpu_count() or 1, num_bundles),
                object_store_memory=cluster.object_store_mib << 20,
                include_dashboard=False,
                log_to_driver=False,
                logging_level="error",
                _temp_dir=str(self.scope.temp_dir),
                runtime_env={"env_vars": environment},
            )
        group = self._placement_group(num_bundles)
        # The engine's imports take longest: start it first, wait for it last.
        engines = [self._actor(_EngineActor, group, 0, engine_spec(self._config))] if with_engine else []
        ranks = [self._actor(_RankActor, group, rank, rank) for rank in range(layout.world_size)]
        processes = [Process(f"trainer rank {i}", actor) for i, actor in enumerate(ranks)]
        self.workers = WorkerGroup(processes, tp=layout.tp, timeout_s=self._config.rollout.timeout_s)
        self.engines = EngineGroup(
            [Process(f"engine {i}", actor) for i, actor in enumerate(engines)],
            timeout_s=self._config.rollout.timeout_s,
        )
        timeout = cluster.start_timeout_s
        prepared = [(p, p.actor.call.remote("prepare")) for p in processes]
        address = wait_all(prepared, timeout_s=timeout, doing="starting the trainer")[0]
        joins = [(p, p.actor.call.remote("join", layout, address, cluster.collective_timeout_s)) for p in processes]
        self.pids = dict(
            zip(
                (p.name for p in processes),
                wait_all(joins, timeout_s=timeout, doing="joining process groups"),
                strict=True,
            )
        )
        ready = [(p, p.actor.call.remote("ready")) for p in self.engines.processes]
        pids = wait_all(ready, timeout_s=timeout, doing="starting the engine")
        self.pids |= dict(zip((p.name for p in self.engines.processes), pids, strict=True))

    def _placement_group(self, num_bundles: int) -> PlacementGroup:
        bundle = platform().bundle()
        group = placement_group([bundle] * num_bundles, strategy="PACK")
        try:
            ray.get(group.ready(), timeout=self._config.cluster.start_timeout_s)
        except GetTimeoutError as error:
            raise ConfigError(
                f"the cluster cannot place {num_bundles} × {bundle}; it has {ray.cluster_resources()}: "
                f"lower actor.layout or raise cluster.num_cpus"
            ) from error
        return group

    def _actor(self, cls: type, group: PlacementGroup, bundle: int, *args: Any) -> Any:
        strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle)
        options = platform().actor_options()
        return ray.remote(cls).options(scheduling_strategy=strategy, **options).remote(*args)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(failed=error is not None)

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
