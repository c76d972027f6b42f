"""Layout and training of every role, with what a configuration leaves open filled in from the actor's."""

from dataclasses import replace

from megarl.config.schema import ActorConfig, Config, ReferenceConfig, RewardModelConfig


def reference_settings(config: Config) -> ActorConfig:
    """The reference's, in the actor's terms."""
    return _frozen_settings(config, config.reference)


def reward_model_settings(config: Config) -> ActorConfig:
    """The reward model's, in the actor's terms."""
    return _frozen_settings(config, config.reward_model)


def _frozen_settings(config: Config, own: ReferenceConfig | RewardModelConfig) -> ActorConfig:
    """Those of a model that only scores."""
    actor = config.actor
    return replace(
        actor,
        layout=own.layout or actor.layout,
        micro_batch_tokens=own.micro_batch_tokens or actor.micro_batch_tokens,
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
        "reward_model": reward_model_settings(config),
    }
