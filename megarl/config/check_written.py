"""Check the settings of demonstrations that a teacher writes while the policy samples."""

from megarl.config.check_distill import teachers_of
from megarl.config.schema import Config, teacher_sections
from megarl.errors import ConfigError


def check_written(config: Config) -> None:
    """Raise ConfigError for teachers that are to write but cannot, and where nothing would learn from what they write.

    Raises it also for writers whom nobody asks.
    """
    cfg, distill = config.algo.demonstrations, config.algo.distill
    if cfg.source == "data":
        for key, each in teacher_sections(config).items():
            if each.writers:
                raise ConfigError(
                    f"{key}.writers: is set, but algo.demonstrations.source=data asks no teacher for demonstrations; "
                    f"set algo.demonstrations.source=teacher, or remove {key}.writers"
                )
        return
    where, asked = "algo.demonstrations.source: got teacher", teachers_of(config)
    if not asked:
        raise ConfigError(
            f"{where} with algo.distill.teacher={distill.teacher}, which has no model that could write; set "
            "algo.distill.teacher=model, or algo.demonstrations.source=data"
        )
    for key, each in asked.items():
        if not each.writers and not each.servers:
            raise ConfigError(
                f"{where}, but neither {key}.writers nor {key}.servers lists servers that could write; list them, as "
                "in [http://host:8000/v1], or set algo.demonstrations.source=data"
            )
    if config.rollout.stop:
        raise ConfigError(
            f"{where} with rollout.stop={list(config.rollout.stop)}, texts at which a teacher does not end; use "
            "rollout.stop_token_ids instead, or set algo.demonstrations.source=data"
        )
    if distill.is_sampled and config.algo.off_policy.loss == "none":
        raise ConfigError(
            f"{where} with algo.distill.mode=sampled, which learns from the policy's own samples alone; set "
            "algo.distill.mode=exact or topk, or algo.off_policy.loss=sft"
        )
