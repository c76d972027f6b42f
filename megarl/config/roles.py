"""Layout and training of every role, with what a configuration leaves open filled in from the actor's."""

from dataclasses import replace

from megarl.config.schema import ActorConfig, Config


def reference_settings(config: Config) -> ActorConfig:
    """The reference's, in the actor's terms."""
    actor, reference = config.actor, config.reference
    return replace(
        actor,
        layout=reference.layout or actor.layout,
        micro_batch_tokens=reference.micro_batch_tokens or actor.micro_batch_tokens,
    )


def critic_settings(config: Config) -> ActorConfig:
    """The critic's, in the actor's terms."""
    actor, critic = config.actor, config.critic
    return replace(
        actor,
        layout=critic.layout or actor.layout,
        optimizer=critic.optimizer,
        recompute=critic.recompute,
        micro_batch_tokens=critic.micro_batch_tokens or actor.micro_batch_tokens,
    )


def role_settings(config: Config) -> dict[str, ActorConfig]:
    """Settings by the name of a role, whether or not a run needs it."""
    return {
        "actor": config.actor,
        "reference": reference_settings(config),
        "critic": critic_settings(config),
    }
