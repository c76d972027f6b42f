"""Start and end the remote processes of a run: Ray, the trainer's ranks and the engines."""

import contextlib
import itertools
import secrets
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Self, cast

import ray
from ray.exceptions import ActorDiedError, ActorUnavailableError, GetTimeoutError, RayTaskError

from megarl.cluster.actors import RankActor, RunActor
from megarl.cluster.bridge import BridgeSync
from megarl.cluster.engine_slots import EngineSlots, create_process, wait_started
from megarl.cluster.engines import EngineGroup
from megarl.cluster.episodes import CLOSE_TIMEOUT_S, SILENCE_S, EnvironmentWorkers
from megarl.cluster.judge_servers import JudgeServerActor
from megarl.cluster.offloading import MemoryLedger
from megarl.cluster.placement import PlacementPlan, ProcessSlot, plan_placement, with_judge_servers
from megarl.cluster.prelude import Prelude
from megarl.cluster.processes import living_results, locate, wait_all
from megarl.cluster.ray_session import open_ray
from megarl.cluster.remotes import A_co, Process, results
from megarl.cluster.reservation import Reservation, spread_environments
from megarl.cluster.roles import actor_role, by_layout, check_serves, engine_spec
from megarl.cluster.supervisor import EngineSupervisor, WeightSync
from megarl.cluster.sync_plan import engine_ranks, plan_input_of, sent_spec
from megarl.cluster.workers import RankGroup, RoleWorkers
from megarl.config.derived import Derived, filled
from megarl.config.schema import Config
from megarl.environments.worker import WorkerSpec
from megarl.errors import RunStopped, WorkerError
from megarl.host import loop
from megarl.host.activity import doing
from megarl.host.clock import awake_s
from megarl.host.device.platform import platform
from megarl.host.ray_environment import keep_worker_logs
from megarl.parallel.worker import RankWorker
from megarl.record.growth import GrowthWatch
from megarl.rollout.routing import router_of
from megarl.sync.plan.engine_shards import engine_needs
from megarl.sync.transport.casts import sent_specs
from megarl.types.messages import RoleSpec
from megarl.weights.families import read_model_spec
from megarl.weights.safetensors_map import TensorSpec, weight_specs

# How often processes are asked for what they have counted, which takes two milliseconds.
_COUNT_EVERY_S = 10.0


class Cluster:
    """The remote processes of a run: Ray, trainer ranks (if `with_trainer`), vLLM engines (if `with_engine`) and the
    servers of judges (if `with_judges`).

    roles: the models that the ranks will host, the actor first; every distinct layout among them gets ranks of its own.
    By default there are only ranks for the actor's layout. derived: what to use for settings that are null. prelude:
    what has begun already; it is closed with this.
    """

    def __init__(
        self,
        config: Config,
        *,
        roles: Sequence[RoleSpec] = (),
        with_engine: bool = True,
        with_trainer: bool = True,
        with_judges: bool = False,
        log_dir: Path | None = None,
        derived: Iterable[Derived] = (),
        prelude: Prelude | None = None,
    ) -> None:
        if ray.is_initialized():
            if prelude is not None:
                prelude.close()
            raise WorkerError(
                "this process is connected to a Ray already; call ray.shutdown() first (cluster.address joins a "
                "cluster that goes on), or run megarl in a process of its own"
            )
        self._with_judges = with_judges
        self._judge_servers: dict[str, list[Process[JudgeServerActor]]] = {}
        # The base URLs of the servers of each entry of `rewards.judge_servers`, and the key that they all ask for.
        self.judge_urls: Mapping[str, tuple[str, ...]] = {}
        self.judge_key = secrets.token_hex(16)
        self._asked, self._log_dir, self._closed = config, log_dir, False
        self._foreign: dict[str, float] = {}
        self._next_count_s = 0.0
        self._growth = GrowthWatch()
        self._config = filled(config, derived)
        self._roles = by_layout(roles or [actor_role(config)]) if with_trainer else {}
        forks_engines = with_engine and config.image_store is None
        self._prelude = prelude or Prelude(
            config.cluster, config.run, with_trainer=with_trainer, with_engine=forks_engines
        )
        self.scope = self._prelude.janitor.scope
        self.engines = EngineGroup([], timeout_s=0)
        self.workers = RoleWorkers([], timeout_s=0)
        try:
            self._start(with_engine)
        except BaseException:
            self.close(failed=True)
            raise

    def check_serves(self, config: Config, roles: Sequence[RoleSpec]) -> None:
        """Raise ConfigError if a run with these settings and roles cannot use the processes of this cluster."""
        check_serves(self._asked, [group.layout for group in self.workers.groups], config, roles)

    def _start(self, with_engine: bool) -> None:
        config, cluster = self._config, self._config.cluster
        device, other_layouts = dict(platform().resources), list(self._roles)[1:]
        shared: Sequence[Sequence[int]] = ()
        if with_engine and self._roles and config.placement.mode == "colocated":
            # Engines share the devices of the ranks that make the transfer smallest.
            spec = read_model_spec(config.model.path, tower=actor_role(config).tower)
            engine = config.rollout.engine
            sent = plan_input_of(spec, config.model, config.actor, engine, config.sync)
            shared = engine_ranks(sent, engine, config.placement.trainer)
        plan = plan_placement(
            config.placement,
            config.rollout.engine,
            config.actor.layout.world_size,
            device,
            with_engines=with_engine,
            with_trainer=bool(self._roles),
            other_layouts=other_layouts,
            engine_ranks=shared,
        )
        if self._with_judges:
            plan = with_judge_servers(plan, self._config.rewards.judge_servers, device)
        with doing("starting Ray"):
            temp_dir, environment = self._prelude.janitor.temp_dir, self._prelude.environment
            open_ray(cluster, num_cpus=plan.num_cpus, temp_dir=temp_dir, environment=environment)
        self._create_processes(plan)
        judges = [
            process.ask(
                JudgeServerActor.start,
                self._config.rewards.judge_servers[name],
                api_key=self.judge_key,
                timeout_s=cluster.start_timeout_s,
                several_hosts=cluster.address is not None,
            )
            for name, processes in self._judge_servers.items()
            for process in processes
        ]
        # Engines take longest: start them first, wait for them last.
        engines = [self._slots.begin(i, p) for i, p in enumerate(self.engines.processes)]
        self.pids = self._join_ranks(plan)
        started = wait_started(engines, timeout_s=cluster.engine_start_timeout_s, doing="starting the engines")
        for i, (process, pids) in enumerate(zip(self.engines.processes, started, strict=True)):
            self.pids |= self._slots.started(i, process, pids)
        urls = iter(wait_all(judges, timeout_s=cluster.start_timeout_s, doing="starting the judges' servers"))
        self.judge_urls = {
            name: tuple(itertools.islice(urls, len(processes))) for name, processes in self._judge_servers.items()
        }

    def _create_processes(self, plan: PlacementPlan) -> None:
        hosts, start_timeout_s = self._config.cluster.hosts, self._config.cluster.start_timeout_s
        environments = self._prelude.runtime_envs()
        reservation = Reservation(plan, hosts=hosts, timeout_s=start_timeout_s, environments=environments)
        self._reservation = reservation
        if plan.ranks and plan.engines and self._config.environment.nodes:
            # Engines take minutes to start.
            spread_environments(self._config.environment, reservation.unused_nodes())
        spec = engine_spec(self._config)
        self._slots = EngineSlots(spec, self._config.cluster, plan.engines, reservation, self._shared_devices)
        slots = [plan.ranks, *plan.other_ranks]
        names = ["trainer", *("+".join(role.role for role in roles) for roles in list(self._roles.values())[1:])]
        ranks = [
            create_process(f"{name} rank {i}", RankActor, reservation, slot, i)
            for name, its_slots in zip(names, slots, strict=True)
            for i, slot in enumerate(its_slots)
        ]
        judges = [
            create_process(f"{slots[0].group} replica {i}", JudgeServerActor, reservation, slot)
            for slots in plan.judges.values()
            for i, slot in enumerate(slots)
        ]
        engines = self._slots.create()
        every: list[Process[RunActor]] = [*ranks, *judges, *engines]
        found = iter(locate(every, timeout_s=start_timeout_s))

        def located(begun: Sequence[Process[A_co]]) -> list[Process[A_co]]:
            # They are those that the roster knows, in the order in which they were begun.
            return cast("list[Process[A_co]]", list(itertools.islice(found, len(begun))))

        rollout, its_ranks, its_judges = self._config.rollout, iter(located(ranks)), iter(located(judges))
        groups = [
            RankGroup(layout=layout, processes=list(itertools.islice(its_ranks, layout.world_size)))
            for layout in self._roles
        ]
        self.workers = RoleWorkers(groups, timeout_s=rollout.timeout_s)
        self._judge_servers = {
            name: list(itertools.islice(its_judges, len(slots))) for name, slots in plan.judges.items()
        }
        router = router_of(rollout, deterministic=self._config.run.deterministic)
        self.engines = EngineGroup(located(engines), timeout_s=rollout.timeout_s, router=router)

    def _shared_devices(self, slot: ProcessSlot) -> list[str]:
        ranks = self.workers.processes
        return [device for rank in slot.shares for device in ranks[rank].location.device_ids]

    def _join_ranks(self, plan: PlacementPlan) -> dict[str, int]:
        """Make the ranks of each layout form their process groups; return the process id of each rank by its name."""
        ranks, timeout_s = self.workers.processes, self._config.cluster.start_timeout_s
        slots = itertools.chain(plan.ranks, *plan.other_ranks)
        prepared = [
            p.ask(RankActor.prepare, self._shared_devices(slot), binds=self._config.placement.bind_numa)
            for p, slot in zip(ranks, slots, strict=True)
        ]
        wait_all(prepared, timeout_s=timeout_s, doing="starting the trainer")
        groups = self.workers.groups
        offers = [group.processes[0].call(RankWorker.offer_rendezvous) for group in groups]
        addresses = wait_all(offers, timeout_s=timeout_s, doing="joining process groups")
        joins = [
            p.call(RankWorker.join, group.layout, address, self._config.cluster.collective_timeout_s)
            for group, address in zip(groups, addresses, strict=True)
            for p in group.processes
        ]
        pids = wait_all(joins, timeout_s=timeout_s, doing="joining process groups")
        return dict(zip((p.name for p in ranks), pids, strict=True))

    def restart_engine(self, index: int) -> None:
        """Start a new engine in place of engine number `index`, which died; see `EngineSlots.restart`."""
        lost = self.engines.processes[index]
        if self._log_dir is not None:
            # A run that succeeds keeps no other worker logs.
            keep_worker_logs(self.scope, self._log_dir)
        self.engines.processes[index], pids = self._slots.restart(index, lost)
        self.pids |= pids

    def open_environment_workers(self, environments: Collection[str], config: Config) -> EnvironmentWorkers | None:
        """Start workers for these environments in place of those of an earlier run; None if there are none to run."""
        if self.engines.environment_workers is not None:
            self.engines.environment_workers.close()
            self.engines.environment_workers = None
        if environments:
            spec = WorkerSpec(
                model_path=config.model.path,
                chat_template=config.data.chat_template,
                names=tuple(sorted(environments)),
                config=config.environment,
                max_prompt_tokens=config.data.max_prompt_tokens,
                marks_texts=config.algo.echo_coef > 0,
                form=config.data,
                store=config.image_store,
            )
            # With nodes of their own, Ray is to say first that a node is lost.
            own = config.environment.nodes > 0
            self.engines.environment_workers = EnvironmentWorkers(
                spec,
                timeout_s=config.cluster.start_timeout_s,
                trouble=self.engines.trouble,
                unused_nodes=self._reservation.unused_nodes if own else None,
                silence_s=SILENCE_S + (config.cluster.node_timeout_s if own else 0.0),
            )
            self.pids |= {process.name: process.location.pid for process in self.engines.environment_workers.processes}
        return self.engines.environment_workers

    def weight_sync(self, specs: Mapping[str, TensorSpec] | None = None) -> BridgeSync:
        """Return an open `BridgeSync`, which sends tensors of the actor to the engines. Load the actor first.

        specs: those of `sent_spec`; by default all of them.
        """
        engine, tower = self._config.rollout.engine, actor_role(self._config).tower
        model = sent_spec(self._config.actor.lora, read_model_spec(self._config.model.path, tower=tower))
        if specs is None:
            specs = weight_specs(model, self._config.model.dtype, by_expert=True)
        return BridgeSync(
            self.workers.groups[0].processes,
            self.engines.processes,
            sent_specs(model, specs, self._config.sync.dtype),
            engine_needs(model, engine.tp, stages=engine.pp, expert_parallel=engine.expert_parallel),
            self._config.sync,
            shares=self._slots.shares,
            segments=self.scope.new_shm_file("bridge"),
            timeout_s=self._config.rollout.timeout_s,
        )

    def metrics(self, step: int) -> dict[str, float]:
        """Measure the run's processes on this host, and count what listeners on all hosts have closed."""
        if (now := awake_s()) >= self._next_count_s:
            self._next_count_s = now + _COUNT_EVERY_S
            self._foreign = self._count_foreign()
        here, environments = ray.get_runtime_context().get_node_id(), self.engines.environment_workers
        every = [*self._processes(), *([] if environments is None else environments.processes)]
        elsewhere = {process.name for process in every if process.location.host != here}
        # The number of a process elsewhere may be another's here.
        own = {name: i for name, i in self.pids.items() if not elsewhere & {name, name.rpartition(" worker ")[0]}}
        return self._growth.metrics(step, own) | self._foreign

    def _count_foreign(self) -> dict[str, float]:
        environments = self.engines.environment_workers
        others = () if environments is None else environments.processes
        each_host = {p.location.files: p for p in (*others, *reversed(self._processes()))}
        asked = living_results(
            [process.ask(RunActor.read_foreign) for process in each_host.values()],
            timeout_s=self._config.rollout.timeout_s,
            doing="counting foreign connections",
        )
        closed = sum((Counter(found) for found in loop.wait(asked)), Counter[str]())
        return {f"foreign_connections/{name}": float(n) for name, n in closed.items()}

    def _processes(self) -> list[Process[RunActor]]:
        return [*self.workers.processes, *self.engines.processes, *itertools.chain(*self._judge_servers.values())]

    def supervisor(self, config: Config, memory: MemoryLedger, open_sync: Callable[[], WeightSync]) -> EngineSupervisor:
        """Return the supervisor of the engines of a run. open_sync: returns what brings them their weights."""
        return EngineSupervisor(
            self.engines,
            self.restart_engine,
            memory,
            open_sync,
            max_restarts=config.rollout.max_engine_restarts,
            deterministic=config.run.deterministic,
            verify=config.sync.verify,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.close(failed=error is not None and not isinstance(error, RunStopped))

    def close(self, *, failed: bool = False) -> None:
        """End every process of the run; after a failure, first copy the workers' logs to RUN/logs.

        A second call does nothing, since Ray may by then belong to another `Cluster` of this process.
        """
        if self._closed:
            return
        self._closed = True
        with doing("ending the processes"):
            try:
                loop.abandon()
                if ray.is_initialized():
                    if self.engines.environment_workers is not None:
                        self.engines.environment_workers.close()
                    if not failed:
                        ends = [p.ask(RunActor.close) for p in self._processes()]
                        with contextlib.suppress(RayTaskError, ActorDiedError, ActorUnavailableError, GetTimeoutError):
                            results(ends, timeout_s=CLOSE_TIMEOUT_S)
                    elif self._log_dir is not None:
                        keep_worker_logs(self.scope, self._log_dir)
            finally:
                ray.shutdown()
                self._prelude.close()
