"""Build the parts of a `Trainer` from a configuration."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from megarl.algos.batch_statistics import step_scale
from megarl.algos.objectives import ValueLoss
from megarl.cluster import offloading
from megarl.cluster.cluster import Cluster
from megarl.cluster.roles import engine_spec
from megarl.cluster.supervisor import EngineSupervisor
from megarl.config.batches import batch_counts, num_actor_steps
from megarl.config.check_distill import teacher_of, teachers_of
from megarl.config.judges import JudgeConfig
from megarl.parallel.backend import shares_prefixes
from megarl.record.checkpoints import CheckpointManager
from megarl.record.metrics import Timers
from megarl.record.performance import PerformanceMeter, StepProfiler, peak_of
from megarl.record.recorder import RunRecorder
from megarl.rewards.build import CompletionsOf, open_rewards
from megarl.rewards.llm import Completions, EndpointCompletions
from megarl.rewards.manager import RewardManager
from megarl.rollout.regenerate import RegenerateSource
from megarl.rollout.replay import ReplaySource, record_path
from megarl.rollout.scheduler import Scheduler
from megarl.rollout.source import RolloutSource, Wait
from megarl.rollout.vllm_source import VllmSource
from megarl.train.canary import open_canary
from megarl.train.collect import Rollouts
from megarl.train.forward import ForwardStage
from megarl.train.gate import MismatchGate
from megarl.train.inputs import TrainInputs
from megarl.train.loop import Trainer, UpdateStage
from megarl.train.model_judge import ModelJudge, ModelRewards, max_reward_tokens
from megarl.train.outcome import FirstSteps
from megarl.train.passes import CountedObjective, Passes, RolePasses, RoleUpdater
from megarl.train.policy_judge import PolicyCompletions
from megarl.train.prompt_queue import PromptQueue, open_sampler
from megarl.train.served_teacher import ServedTeacher, TeacherWriter, comparison_of
from megarl.train.taught_source import TaughtSource
from megarl.train.validate import Validator
from megarl.types import TokenQuantity
from megarl.types.messages import Role
from megarl.weights.families import read_model_spec


def build_trainer(inputs: TrainInputs, cluster: Cluster, recorder: RunRecorder) -> Trainer:
    """Build the trainer of a run. Raises ConfigError if the cluster was started for another kind of run."""
    config, workers, paths, timers = inputs.config, cluster.workers, recorder.paths, Timers()
    cluster.check_serves(config, inputs.roles)
    offload, schedule = config.placement.offload, config.rollout.schedule
    pauses = config.placement.mode == "colocated" and config.rollout.source == "vllm" and schedule.staleness > 0
    memory = offloading.MemoryLedger(workers, cluster.engines, enabled=offload, pauses=pauses)
    supervisor = cluster.supervisor(config, memory, cluster.weight_sync)
    names = inputs.train.environments | (frozenset() if inputs.val is None else inputs.val.environments)
    live = VllmSource(supervisor, cluster.open_environment_workers(names, config), config.environment)
    scheduler, source = _open_source(inputs, supervisor, live)
    passes = _passes(inputs, cluster)
    completions = partial(_completions, inputs, cluster, supervisor, memory)
    rewards, validation_rewards = _reward_managers(inputs, passes, memory, completions)
    rollouts = Rollouts(
        algo=config.algo,
        rollout=config.rollout,
        total_steps=config.trainer.total_steps,
        run_seed=config.run.seed,
        scheduler=scheduler,
        queue=PromptQueue(
            open_sampler(config.data, config.trainer, config.rollout.schedule, inputs.train, seed=config.run.seed)
        ),
        prompts=inputs.train,
        source=source,
        wait=supervisor.wait,
        rewards=rewards,
        stop_tokens=inputs.answers.stop_tokens,
        record_file=recorder.owned(partial(record_path, paths.records)),
        enter=memory.enter,
        timers=timers,
    )
    forward = _forward_stage(inputs, cluster, passes, memory, timers)
    gate = MismatchGate(config.trainer, config.model, config.rollout.engine)
    max_tokens = engine_spec(config).max_model_tokens
    canary_of = partial(open_canary, cluster.engines, supervisor, memory, file=paths.canary)
    return Trainer(
        inputs=inputs,
        state=inputs.algorithm.initial_state(),
        cluster=cluster,
        recorder=recorder,
        memory=memory,
        rollouts=rollouts,
        forward=forward,
        gate=gate,
        canary=canary_of(
            passes[Role.ACTOR], config.sync, config.rollout, max_model_tokens=max_tokens, limit=gate.limit
        ),
        updates=_update_stage(inputs, cluster, memory, timers),
        supervisor=supervisor,
        validator=_open_validator(inputs, live, supervisor.wait, validation_rewards, recorder, forward),
        checkpoints=CheckpointManager(
            paths.checkpoints, config.checkpoint, workers, inputs.roles, recorder.require_owned
        ),
        profiler=StepProfiler(workers, config.logging.profile_steps, paths.profile),
        meter=_meter(inputs),
        timers=timers,
        first_steps=FirstSteps(total_steps=config.trainer.total_steps),
    )


def _forward_stage(
    inputs: TrainInputs,
    cluster: Cluster,
    passes: Mapping[Role, RolePasses],
    memory: offloading.MemoryLedger,
    timers: Timers,
) -> ForwardStage:
    config = inputs.config
    return ForwardStage(
        passes=passes,
        teachers=_teachers(inputs, cluster, passes),
        teacher_of=lambda prompt: Role(teacher_of(config, prompt.data_source, prompt.environment)),
        hints=inputs.hints,
        hinted_teacher=config.algo.distill.teacher == "hint",
        enter=memory.enter,
        timers=timers,
    )


def _meter(inputs: TrainInputs) -> PerformanceMeter:
    config = inputs.config
    return PerformanceMeter(
        inputs.spec.dims,
        num_ranks=config.actor.layout.world_size,
        num_epochs=config.trainer.num_epochs,
        peak_tflops=peak_of(config.logging, config.model.dtype),
        shares_prefixes=shares_prefixes(config.actor),
        tower=inputs.spec.tower,
    )


def _open_validator(
    inputs: TrainInputs,
    source: RolloutSource,
    wait: Wait,
    rewards: RewardManager,
    recorder: RunRecorder,
    forward: ForwardStage,
) -> Validator | None:
    """Open the validation of a run; None without data for it."""
    if inputs.val is None:
        return None
    config = inputs.config
    return Validator(
        settings=config.validation,
        rollout=config.rollout,
        best_metric=config.checkpoint.best_metric,
        run_seed=config.run.seed,
        total_steps=config.trainer.total_steps,
        data=inputs.val,
        tokenizer=inputs.tokenizer,
        stop_token_ids=inputs.answers.stop_tokens.stop_token_ids,
        source=source,
        wait=wait,
        rewards=rewards,
        answers=recorder.owned(recorder.paths.validation),
        enter=forward.enter,
        compare=forward.held_out_divergence if config.algo.distill.teacher == "model" else None,
    )


def _open_source(
    inputs: TrainInputs, supervisor: EngineSupervisor, live: VllmSource
) -> tuple[Scheduler, RolloutSource]:
    """Open the source of the samples to train on, and return it with the scheduler that decides what it samples.

    live: the source that samples with the engines.
    """
    rollout, num_prompts = inputs.config.rollout, inputs.config.trainer.prompts_per_step
    schedule = rollout.schedule
    scheduler = Scheduler(
        prompts_per_step=num_prompts, staleness=schedule.staleness, window=schedule.window(num_prompts)
    )
    if rollout.source == "vllm":
        is_taught = inputs.config.algo.demonstrations.source == "teacher"
        return scheduler, _taught(inputs, live) if is_taught else live
    assert rollout.replay_dir is not None, "the configuration was checked"
    directory = Path(rollout.replay_dir)
    # A record has what trained in each step: nothing runs ahead.
    synchronous = Scheduler(prompts_per_step=num_prompts)
    if rollout.source == "replay":
        return synchronous, ReplaySource(directory)
    return synchronous, RegenerateSource(directory=directory, engines=supervisor, max_lag=scheduler.max_lag)


def _taught(inputs: TrainInputs, live: RolloutSource) -> TaughtSource:
    """Return a source that samples with the teachers of a run, whose servers write demonstrations."""
    config, stop_tokens = inputs.config, inputs.answers.stop_tokens
    writers = {
        key: TeacherWriter(
            each,
            key=key,
            sampling=config.rollout.sampling(stop_tokens.stop_token_ids),
            end_ids=stop_tokens.token_ids,
            num_common=inputs.common_tokens,
        )
        for key, each in teachers_of(config).items()
    }
    return TaughtSource(
        demonstrations=config.algo.demonstrations,
        num_samples=config.rollout.num_samples,
        live=live,
        writer_of=lambda prompt: writers[teacher_of(config, prompt.data_source, prompt.environment)],
        stop_tokens=stop_tokens,
    )


def _passes(inputs: TrainInputs, cluster: Cluster) -> dict[Role, RolePasses]:
    """Return the forward passes of each role of a run."""
    config, passes = inputs.config, {}
    asked: dict[Role, dict[str, Any]] = {
        Role.TEACHER: {"top_k": config.algo.distill.asked_top_k, "common": inputs.common_tokens},
        Role.ACTOR: {"squares": TokenQuantity.OLD_SQUARES in inputs.algorithm.requires()},
    }
    for role in inputs.roles:
        dims, more = read_model_spec(role.model.path).dims, asked.get(role.role.kind, {})
        passes[role.role] = RolePasses(cluster.workers, role, temperature=config.rollout.temperature, dims=dims, **more)
    return passes


def _teachers(inputs: TrainInputs, cluster: Cluster, passes: Mapping[Role, RolePasses]) -> dict[Role, Passes]:
    """Return what asks each teacher of a run; a policy that teaches itself is asked as the teacher."""
    config, dims = inputs.config, inputs.spec.dims
    temperature, top_k = config.rollout.temperature, config.algo.distill.asked_top_k
    teachers: dict[Role, Passes] = {
        Role(key): ServedTeacher(each, key=key, top_k=top_k, common=inputs.common_tokens, num_rows=dims.vocab)
        if each.servers
        else passes[Role(key)]
        for key, each in teachers_of(config).items()
    }
    if config.algo.distill.teacher == "hint" and not teachers:
        (actor,) = (role for role in inputs.roles if role.role is Role.ACTOR)
        teachers[Role.TEACHER] = RolePasses(cluster.workers, actor, temperature=temperature, dims=dims, top_k=top_k)
    return teachers


def _reward_managers(
    inputs: TrainInputs,
    passes: dict[Role, RolePasses],
    memory: offloading.MemoryLedger,
    completions: CompletionsOf,
) -> tuple[RewardManager, RewardManager]:
    """Return the reward managers of training and of validation.

    Validation uses the rule alone if the rule knows all of its data sources.
    """
    model = None
    if inputs.conversations is not None:
        judge = passes[Role.REWARD]
        limit = max_reward_tokens(judge.spec)
        model = ModelJudge(ModelRewards(judge, inputs.conversations, max_tokens=limit, enter=memory.enter))
    val_sources = set() if inputs.val is None else inputs.val.data_sources
    sources = inputs.train.data_sources | val_sources
    rewards = open_rewards(inputs.config.rewards, sources, inputs.tokenizer, model=model, completions=completions)
    by_rule = bool(val_sources) and all(map(rewards.knows, val_sources))
    return rewards, rewards.by_rule() if by_rule else rewards


def _completions(
    inputs: TrainInputs,
    cluster: Cluster,
    supervisor: EngineSupervisor,
    memory: offloading.MemoryLedger,
    name: str,
    cfg: JudgeConfig,
) -> Completions:
    """Return how to ask the model of a judge that belongs to the run: a server of its own, or the policy."""
    if cfg.server is not None:
        return EndpointCompletions(cfg, name=name, urls=cluster.judge_urls[cfg.server], api_key=cluster.judge_key)
    rollout = inputs.config.rollout
    return PolicyCompletions(
        VllmSource(supervisor),
        supervisor.wait,
        inputs.tokenizer,
        cfg.sampling,
        max_tokens=rollout.engine.max_model_tokens or inputs.spec.max_positions,
        stop_token_ids=inputs.answers.stop_tokens.declared,
        run_seed=inputs.config.run.seed,
        timeout_s=rollout.timeout_s,
        enter=memory.enter,
    )


def _update_stage(
    inputs: TrainInputs, cluster: Cluster, memory: offloading.MemoryLedger, timers: Timers
) -> UpdateStage:
    """Build the update stage, with an updater for every trained role, each with its own objective and schedule."""
    config, per_step = inputs.config, batch_counts(inputs.config).optimizer_steps_per_step
    has_critic = any(role.role is Role.CRITIC for role in inputs.roles)
    objectives: dict[Role, CountedObjective] = {
        Role.ACTOR: inputs.algorithm,
        Role.CRITIC: ValueLoss(clip=config.critic.value_clip),
    }
    steps = {
        Role.ACTOR: num_actor_steps(config, has_critic=has_critic),
        Role.CRITIC: config.trainer.total_steps,
    }
    algo = config.algo
    teaching = comparison_of(algo, inputs.roles, inputs.common_tokens)
    has_others = algo.advantage.estimator != "none" or algo.demonstrations.strategy != "none" or algo.plugins
    # The prompts of the first steps may have no hints.
    is_taught = algo.distill.teacher == "model" and not has_others
    updaters = {
        role.role: RoleUpdater(
            cluster.workers,
            role,
            objectives[role.role],
            total_steps=steps[role.role] * per_step,
            temperature=config.rollout.temperature,
            dims=read_model_spec(role.model.path).dims,
            teaching=teaching if role.role is Role.ACTOR else None,
            is_taught=is_taught and role.role is Role.ACTOR,
            step_scale=partial(step_scale, cfg=algo) if role.role is Role.ACTOR else lambda _: 1.0,
            measures=partial(config.logging.records, total_steps=config.trainer.total_steps),
        )
        for role in inputs.roles
        if role.trainable
    }
    return UpdateStage(
        trainer=config.trainer,
        updaters=updaters,
        roles=inputs.roles,
        has_critic=has_critic,
        critic_warmup_steps=config.critic.warmup_steps,
        enter=memory.enter,
        timers=timers,
    )
