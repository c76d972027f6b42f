"""Which runs can use the same processes."""

from collections.abc import Collection, Sequence

from megarl.config.schema import Config, LayoutConfig
from megarl.errors import ConfigError
from megarl.rollout.engine import engine_spec
from megarl.types.messages import Role, RoleSpec


def check_serves(ours: Config, layouts: Collection[LayoutConfig], theirs: Config, roles: Sequence[RoleSpec]) -> None:
    """ConfigError unless a run of `roles` with `theirs` can use processes started with `ours` for `layouts`."""
    differing = [
        name
        for name, a, b in (
            ("actor.layout", ours.actor.layout, theirs.actor.layout),
            ("placement", ours.placement, theirs.placement),
            ("model.dtype", ours.model.dtype, theirs.model.dtype),
            ("rollout.engine", ours.rollout.engine, theirs.rollout.engine),
            ("sync.transport", ours.sync.transport, theirs.sync.transport),
            ("sync.host_group", ours.sync.host_group, theirs.sync.host_group),
            ("sync.dtype", ours.sync.dtype, theirs.sync.dtype),
            ("sync.delta", ours.sync.delta, theirs.sync.delta),
            ("sync.delta_full_every", ours.sync.delta_full_every, theirs.sync.delta_full_every),
            ("sync.cuda_ipc", ours.sync.cuda_ipc, theirs.sync.cuda_ipc),
            ("rollout.timeout_s", ours.rollout.timeout_s, theirs.rollout.timeout_s),
            # It decides whether the engines cache prefixes.
            ("run.deterministic", ours.run.deterministic, theirs.run.deterministic),
        )
        if a != b
    ]
    others = [role for role in roles if role.role is not Role.ACTOR]
    differing += [f"{role.role}.layout" for role in others if role.layout not in layouts]
    if engine_spec(theirs).max_model_tokens > engine_spec(ours).max_model_tokens:
        differing.append("rollout.engine.max_model_tokens")
    if differing:
        raise ConfigError(f"this cluster was started with another {', '.join(differing)}; start one for this run")
