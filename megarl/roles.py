"""Which models a run needs, as its algorithm asks."""

from dataclasses import replace

from megarl.config.schema import Config
from megarl.parallel.messages import Role, RoleSpec
from megarl.types import Algorithm, Score


def roles_of(config: Config, algorithm: Algorithm) -> tuple[RoleSpec, ...]:
    """The actor, and a frozen reference if the algorithm reads its scores."""
    actor = RoleSpec(role=Role.ACTOR, model=config.model, settings=config.actor)
    if Score.REF_LOGPROBS not in algorithm.requires():
        return (actor,)
    return (actor, replace(actor, role=Role.REFERENCE, trainable=False))
