"""Check that a run measures the scores by which `checkpoint.keep_best` compares checkpoints."""

from collections.abc import Sequence

from megarl.config.schema import CheckpointConfig, Config, SftConfig, TrainPreferenceConfig, TrainRewardConfig
from megarl.errors import ConfigError


def check_scores_for_keep_best(config: Config) -> None:
    """Raise ConfigError unless the checkpoints of an RL run have scores, if the best are to be kept."""
    checkpoint, validation, every = config.checkpoint, config.validation, config.validation.every_steps
    if checkpoint.keep_best == 0:
        return
    _require_validated_checkpoints(checkpoint, "data.val", config.data.val, "validation.every_steps", every)
    if checkpoint.best_metric == "val/test_score_greedy" and not validation.greedy:
        raise ConfigError(
            "checkpoint.best_metric: got 'val/test_score_greedy', but validation.greedy=false; set it to true, or "
            "checkpoint.best_metric=val/test_score"
        )


def check_supervised_scores_for_keep_best(config: Config, name: str) -> None:
    """Raise ConfigError unless the checkpoints of a supervised run have scores, if the best are to be kept.

    name: the section of the command, such as `sft`.
    """
    run: SftConfig | TrainRewardConfig | TrainPreferenceConfig = getattr(config, name)
    if config.checkpoint.keep_best:
        every_key = f"{name}.val_every_steps"
        _require_validated_checkpoints(config.checkpoint, f"{name}.val", run.val, every_key, run.val_every_steps)


def _require_validated_checkpoints(
    checkpoint: CheckpointConfig, val_key: str, val: Sequence[str], every_key: str, every_steps: int
) -> None:
    if not val:
        raise ConfigError(
            f"checkpoint.keep_best: got {checkpoint.keep_best}, but {val_key} is empty, so no checkpoint has a score; "
            f"set {val_key}, or checkpoint.keep_best=0"
        )
    if checkpoint.every_steps % every_steps:
        raise ConfigError(
            f"checkpoint.every_steps: got {checkpoint.every_steps}, expected a multiple of {every_key}={every_steps}, "
            "or checkpoints have no score to keep the best by; change either, or set checkpoint.keep_best=0"
        )
