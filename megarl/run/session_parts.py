"""Start the processes of a session, and keep together what its calls use; these are the parts of a `Trainer`."""

import contextlib
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from megarl.algos.objectives import ValueLoss
from megarl.cluster import offloading
from megarl.cluster.cluster import Cluster
from megarl.cluster.roles import engine_spec
from megarl.cluster.supervisor import EngineSupervisor
from megarl.cluster.workers import RoleWorkers
from megarl.config.schema import role_settings
from megarl.errors import ConfigError, RunError, WorkerError
from megarl.host.activity import doing
from megarl.host.writing import writing
from megarl.plan.build import derive_run, settle_run
from megarl.plan.sizes import derive_trainer
from megarl.record.checkpoints import RunState, mark_complete, read_checkpoint
from megarl.record.inputs import RunInputs, texts_of
from megarl.record.metrics import STATE_FILE, RunPaths
from megarl.run.resume import require_same_files
from megarl.run.session_inputs import SessionInputs
from megarl.train.canary import Canary, open_canary
from megarl.train.gate import MismatchGate
from megarl.train.passes import CountedObjective, RolePasses, RoleUpdater
from megarl.train.prompt_queue import PromptQueue, open_sampler
from megarl.types import AlgoState
from megarl.types.messages import LoadRequest, Role
from megarl.weights.families import read_model_spec

# How long ranks get to answer after a pass has failed; those that wait for one that gave up do not answer at all.
ANSWER_S = 30.0


@dataclass(slots=True, kw_only=True)
class SessionParts:
    """The live parts of a session. supervisor, canary: None without engines. queue: None without prompts of the run.

    files: those that it computes from. lost: why the session cannot go on; empty while it can.
    """

    inputs: SessionInputs
    workers: RoleWorkers
    memory: offloading.MemoryLedger
    passes: dict[Role, RolePasses]
    supervisor: EngineSupervisor | None
    canary: Canary | None
    queue: PromptQueue | None
    files: RunInputs
    lost: str = ""

    def before_update(self, role: Role, version: int, *, step: int) -> dict[str, float]:
        """Prepare an optimizer step of a role; return the canary's metrics. version: of the engines' weights."""
        if role is not Role.ACTOR or self.supervisor is None or self.canary is None:
            return {}
        found = self.canary.check(version, step)
        self.supervisor.outdate()
        return found

    def save(self, directory: Path, *, num_draws: int, algo: AlgoState) -> None:
        """Write a checkpoint of any layout to a new directory."""
        if directory.exists():
            raise ConfigError(f"save: {directory} exists; give a new directory, or remove it")
        steps = {name: each.num_optimizer_steps for name, each in self.passes.items() if isinstance(each, RoleUpdater)}
        state = RunState(
            command="session",
            step=num_draws,
            num_optimizer_steps=steps[Role.ACTOR],
            num_critic_steps=steps.get(Role.CRITIC, 0),
            sampler={} if self.queue is None else self.queue.state_dict(),
            algo=algo,
            source={},
            score=None,
            config=self.inputs.config,
            inputs=self.files.to_json(),
        )
        self.memory.enter(offloading.checkpointing(self.inputs.roles))
        with doing("saving"), writing(directory):
            directory.mkdir(parents=True)
            (directory / STATE_FILE).write_text(state.to_json(), encoding="utf-8")
            self.workers.start_checkpoint(directory, portable=True)
            self.workers.finish_checkpoint(wait=True)
            mark_complete(directory)

    def load(self, directory: Path, *, weights_only: bool) -> RunState:
        """Read a checkpoint of a session or a run, and return its state; with `weights_only`, counters stay."""
        checkpoint = read_checkpoint(directory)
        state = checkpoint.state
        saved, ours = state.config.actor.lora, self.inputs.config.actor.lora
        if (saved is None) != (ours is None):
            raise ConfigError(
                f"load: {directory} was saved {'without' if saved is None else 'with'} adapters, and actor.lora is "
                f"{'not ' if ours is None else ''}set here; open the session with the same"
            )
        if not weights_only:
            # A run computes from further files.
            saved_files = {key: each for key, each in state.inputs.items() if key in self.files.stock}
            changed, _, _ = self.files.changes_since(saved_files)
            require_same_files(checkpoint, self.inputs.config, changed, remedy="pass weights_only=True")
        same = checkpoint.same_layout(role_settings(self.inputs.config))
        self.memory.enter(offloading.checkpointing(self.inputs.roles))
        if self.canary is not None:
            self.canary.forget()
        with doing("loading"):
            self.workers.load_checkpoint(checkpoint.path, same_layout=same, weights_only=weights_only)
        if not weights_only:
            for role, count in ((Role.ACTOR, state.num_optimizer_steps), (Role.CRITIC, state.num_critic_steps)):
                if isinstance(updater := self.passes.get(role), RoleUpdater):
                    updater.num_optimizer_steps = count
            if self.queue is not None and state.sampler:
                self.queue.load_state_dict(state.sampler)
        return state

    def role(self, name: str) -> Role:
        """Return a role of this session. RunError: the session is lost; ConfigError: it has no such role."""
        if self.lost:
            raise RunError(self.lost)
        if name not in self.passes:
            raise ConfigError(
                f"role: got {name!r}, expected one of {', '.join(self.passes)}; a reference comes with "
                "with_reference=True, a critic with an algorithm that has one"
            )
        return Role(name)

    def forget(self, role: Role) -> None:
        """Make all ranks discard a role's gradients; if they do not answer, the session is lost."""
        try:
            self.workers.discard(role, timeout_s=ANSWER_S)
        except WorkerError as silent:
            self.lost = (
                f"the session is lost, since after a failure its ranks do not answer ({silent}); open another one, and "
                "load the last directory that was saved"
            )


def open_parts(stack: contextlib.ExitStack, inputs: SessionInputs, *, with_engines: bool) -> SessionParts:
    """Start a cluster, which ends with `stack`, and load the models."""
    config, roles = settle_run(inputs.config, inputs.roles, inputs.algorithm.requires())
    inputs = replace(inputs, config=config, roles=roles)
    derived = derive_trainer(config, "train")
    files = RunInputs.of(texts_of(config), "session")
    files.hash_in_background()
    if with_engines:
        derived = derive_run(config, roles, inputs.algorithm.requires())
    paths, rollout = RunPaths.of(config.run), config.rollout
    cluster = stack.enter_context(
        Cluster(config, roles=roles, with_engine=with_engines, log_dir=paths.logs, derived=derived)
    )
    workers, offloads = cluster.workers, config.placement.offload and with_engines
    memory = offloading.MemoryLedger(workers, cluster.engines, enabled=offloads)
    memory.enter(offloading.LOAD)
    workers.load(LoadRequest.of(config.run, roles, suspends_nccl=config.placement.suspend_nccl))
    memory.add(offloading.built_parts(roles))
    own: dict[Role, CountedObjective] = {
        Role.ACTOR: inputs.algorithm,
        Role.CRITIC: ValueLoss(clip=config.critic.value_clip),
    }
    passes: dict[Role, RolePasses] = {}
    for role in roles:
        dims, temperature = read_model_spec(role.model.path).dims, rollout.temperature
        passes[role.role] = (
            RoleUpdater(workers, role, own[role.role], total_steps=1, temperature=temperature, dims=dims)
            if role.trainable
            else RolePasses(workers, role, temperature=temperature, dims=dims)
        )
    supervisor = cluster.supervisor(config, memory, cluster.weight_sync) if with_engines else None
    gate = MismatchGate(config.trainer, config.model, rollout.engine)
    canary_of = partial(
        open_canary, limit=gate.limit, max_model_tokens=engine_spec(config).max_model_tokens, file=paths.canary
    )
    actor = passes[Role.ACTOR]
    sampler_of = partial(open_sampler, config.data, config.trainer, rollout.schedule, seed=config.run.seed)
    parts = SessionParts(
        inputs=inputs,
        workers=workers,
        memory=memory,
        passes=passes,
        supervisor=supervisor,
        canary=None
        if supervisor is None
        else canary_of(cluster.engines, supervisor, memory, actor, config.sync, rollout),
        queue=None if inputs.prompts is None else PromptQueue(sampler_of(inputs.prompts)),
        files=files,
    )
    if supervisor is not None:
        # After a failure, ranks may not answer; the end of the cluster removes what they share.
        stack.push(lambda kind, *_: None if kind or parts.lost else supervisor.close())
    return parts
