"""Determine which models and engines a run needs, which models share trainer ranks, and whether started processes suit
a run.
"""

from collections.abc import Collection, Sequence
from dataclasses import replace

from megarl.config.check_distill import teachers_of
from megarl.config.lora import sent_alone
from megarl.config.schema import Config, LayoutConfig, ModelConfig, role_settings
from megarl.config.setting import affected
from megarl.errors import ConfigError
from megarl.host.device.platform import platform
from megarl.rollout.engine_spec import EngineSpec, max_logprobs
from megarl.types import TokenQuantity
from megarl.types.messages import Head, Role, RoleSpec, Vision


def actor_role(config: Config) -> RoleSpec:
    """Return the specification of the actor: the policy, which every run trains."""
    return RoleSpec(
        role=Role.ACTOR,
        model=config.model,
        settings=config.actor,
        vision=_vision(config, moves=True),
        kept_versions=config.algo.policy_loss.kept_versions,
    )


def _vision(config: Config, *, moves: bool = False) -> Vision | None:
    """Return how a run's models read the images of its prompts; None: it has none. moves: with the actor, or as it."""
    if config.image_store is None:
        return None
    return Vision(store=config.image_store, train=config.actor.vision.train if moves else "none")


def roles_of(config: Config, required: Collection[TokenQuantity]) -> tuple[RoleSpec, ...]:
    """List a run's models: the actor, a reference and a critic if quantities of them are required, teachers, and any
    reward model.
    """
    roles = [actor_role(config)]
    if TokenQuantity.REF_LOGPROBS in required:
        roles.append(reference_role(config))
    roles += teacher_roles(config)
    if TokenQuantity.VALUES in required:
        roles.append(_scalar_role(config, Role.CRITIC, config.critic.model_path, trainable=not config.critic.freeze))
    if config.rewards.uses("model"):
        roles.append(_scalar_role(config, Role.REWARD, config.reward_model.model_path, trainable=False))
    return tuple(roles)


def _scalar_role(config: Config, role: Role, model_path: str | None, *, trainable: bool) -> RoleSpec:
    """Return a critic or reward model, whose adapters, if it has any, may be on the actor's weights."""
    model, settings = _model(config, model_path), role_settings(config)[role]
    base_of = None if settings.lora is None else _base_of(config, model, settings.layout)
    return RoleSpec(
        role=role,
        model=model,
        settings=settings,
        head=Head.SCALAR,
        trainable=trainable,
        base_of=base_of,
        vision=_vision(config),
    )


def teacher_roles(config: Config) -> list[RoleSpec]:
    """List the roles of a run's teachers on Megatron; those behind servers do not count, nor does the policy itself.

    A teacher that is the actor's model is the actor without adapters, if that trains any; one that follows the actor
    has adapters of its own.
    """
    settings, rate = role_settings(config), config.algo.distill.teacher_update_rate
    in_update_of = Role.ACTOR if config.algo.distill.mode == "exact" else None
    return [
        RoleSpec(
            role=Role(key),
            model=_model(config, each.model_path),
            settings=settings[key],
            trainable=False,
            in_update_of=in_update_of,
            # One that never moves is a frozen model.
            update_rate=rate or None,
            base_of=_base_of(config, _model(config, each.model_path), settings[key].layout),
            vision=_vision(config, moves=bool(rate)),
        )
        for key, each in teachers_of(config).items()
        if not each.servers
    ]


def reference_role(config: Config) -> RoleSpec:
    """Return the role of the frozen reference model, for runs that read its log-probs.

    If the actor trains adapters on the same model in the same layout, the reference is the actor without them. One that
    is reset is an average that moves all the way to the actor, now and then.
    """
    settings = role_settings(config)[Role.REFERENCE]
    model = _model(config, config.reference.model_path)
    base_of = _base_of(config, model, settings.layout)
    every = config.algo.kl.reset_every_steps
    return RoleSpec(
        role=Role.REFERENCE,
        model=model,
        settings=settings,
        trainable=False,
        base_of=base_of,
        update_rate=None if every is None else 1.0,
        update_every=every or 1,
        vision=_vision(config, moves=every is not None),
    )


def reward_role(config: Config) -> RoleSpec:
    """Return the role of the reward model that `megarl train-reward` trains: model.path with the actor's settings."""
    return RoleSpec(role=Role.REWARD, model=config.model, settings=config.actor, head=Head.SCALAR)


def _base_of(config: Config, model: ModelConfig, layout: LayoutConfig) -> Role | None:
    """Return the actor if it leaves its weights as they are, and those of a role's model would be the same."""
    is_same = config.actor.lora is not None and model == config.model and layout == config.actor.layout
    return Role.ACTOR if is_same else None


def _model(config: Config, path: str | None) -> ModelConfig:
    return config.model if path in (None, config.model.path) else replace(config.model, path=path, config_path=None)


def model_key(config: Config, role: RoleSpec) -> str:
    """Return the configuration key that says where a role's model is, such as `reference.model_path`."""
    return "model.path" if role.model.path == config.model.path else f"{role.role}.model_path"


def by_layout(roles: Sequence[RoleSpec]) -> dict[LayoutConfig, tuple[RoleSpec, ...]]:
    """Group roles by layout, the actor's layout first; roles with the same layout share trainer ranks."""
    layouts = dict.fromkeys(role.layout for role in sorted(roles, key=lambda role: role.role is not Role.ACTOR))
    return {layout: tuple(role for role in roles if role.layout == layout) for layout in layouts}


def engine_spec(config: Config) -> EngineSpec:
    """Derive the engine's settings from a run's; by default the context holds the longest prompt and response."""
    longest = max(config.rollout.max_response_tokens, config.validation.max_response_tokens or 0)
    needed = config.data.max_prompt_tokens + longest
    engine = config.rollout.engine
    if config.run.deterministic:
        # A cached prefix was computed in another batch than a new one would be: bits would depend on earlier requests.
        engine = replace(engine, prefix_caching=False)
    return EngineSpec(
        model_path=config.model.path,
        dtype=engine.dtype or config.model.dtype,
        seed=config.run.seed,
        max_model_tokens=engine.max_model_tokens or needed,
        config=engine,
        can_sleep=config.placement.offload,
        suspends_nccl=config.placement.suspend_nccl,
        max_nucleus=max(config.rollout.top_k, 0),
        head_tokens=config.rollout.head_tokens,
        batch_invariant=(config.run.deterministic or config.run.batch_invariant) and platform().has_batch_invariance,
        captures_routing=config.actor.moe.replay_routing and config.rollout.source == "vllm",
        binds=config.placement.bind_numa,
        lora=sent_alone(config.actor.lora),
        vision=_vision(config, moves=True),
    )


def check_serves(ours: Config, layouts: Collection[LayoutConfig], theirs: Config, roles: Sequence[RoleSpec]) -> None:
    """Raise ConfigError if a run with settings `theirs` cannot use processes that were started with `ours`."""
    differing = affected(ours, theirs, "workers")
    others = [role for role in roles if role.role is not Role.ACTOR]
    differing += [f"{role.role}.layout" for role in others if role.layout not in layouts]
    own, wanted = engine_spec(ours), engine_spec(theirs)
    if wanted.max_model_tokens > own.max_model_tokens:
        differing.append("rollout.engine.max_model_tokens")
    if max_logprobs(wanted) > max_logprobs(own):
        differing.append("rollout.top_k" if wanted.max_nucleus else "rollout.head_tokens")
    if differing:
        raise ConfigError(f"this cluster was started with another {', '.join(differing)}; start one for this run")
