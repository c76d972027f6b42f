"""Check a configuration before a command begins: what fields accept, the rules of each section, and those across.

A rule that needs one section alone is in the section's own method `check`. The checks of commands, at the end of the
module, say which sections a command reads and which rules hold across them. `check_rows` has the rules for the lengths
of rows, `check_engines` those between engines and trainer, `check_optimizers` those for optimizer states, `check_model`
those of a model's config.json.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import TypeAlias

from megarl.config.check_distill import check_distill, check_distill_of_sft
from megarl.config.check_engines import (
    check_cache,
    check_engines,
    check_quantization,
    check_replayed_routing,
    check_schedule,
    check_sync,
    check_trainer_nodes,
)
from megarl.config.check_images import check_images, check_no_images
from megarl.config.check_lora import check_lora, check_lora_sync
from megarl.config.check_optimizers import check_optimizers
from megarl.config.check_rows import (
    check_pair_fits_micro_batch,
    check_responses_fit_micro_batch,
    check_row_fits_engine,
    check_row_fits_micro_batch,
    check_sft_row_fits_micro_batch,
)
from megarl.config.check_written import check_written
from megarl.config.part_settings import use_plugins_of
from megarl.config.schema import CheckpointConfig, Config, RewardModelConfig, role_settings
from megarl.config.setting import check_values
from megarl.config.supervised import PairsConfig, SftConfig
from megarl.config.target import has_package, known_devices
from megarl.errors import ConfigError
from megarl.host.device.platform import platform
from megarl.host.masking import require_unmasked

Rule: TypeAlias = Callable[[Config], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandCheck:
    """The check of a configuration for one command.

    sections: the dotted keys of the sections whose own rules hold, with those within them. rules: those across
    sections. Ranges of single fields hold for every command.
    """

    sections: tuple[str, ...]
    rules: tuple[Rule, ...] = ()

    def __call__(self, config: Config) -> None:
        """Raise ConfigError for the first thing that is wrong; its message says what to change."""
        require_unmasked(asdict(config))
        use_plugins_of(config)
        # Values come first: rules across sections divide by these numbers.
        check_values(config, self.sections)
        for rule in self.rules:
            rule(config)


# --- every kind of run


def check_precision(config: Config) -> None:
    """Raise ConfigError for float8 in layers whose other products are not in bfloat16."""
    if config.actor.fp8 is not None and config.model.dtype != "bfloat16":
        raise ConfigError(
            f"actor.fp8: got {config.actor.fp8} with model.dtype={config.model.dtype}, expected bfloat16; change either"
        )


def check_batch_invariance(config: Config) -> None:
    """Raise ConfigError for `run.batch_invariant` where a result would depend on what else is in its batch."""
    if not config.run.batch_invariant:
        return
    here = platform()
    hindrances = {
        f"on {here.name}, whose matrix products depend on the number of tokens": not here.has_batch_invariance,
        "without Transformer Engine, for whose layers Megatron has such kernels": not has_package("transformer_engine"),
        "without the package flash_attn_3, whose attention these kernels need": not has_package("flash_attn_3"),
        f"with actor.fp8={config.actor.fp8}, for which Megatron has no such kernels": config.actor.fp8 is not None,
        **{
            f"with {role}.layout.tp={own.layout.tp}, where NCCL adds parts in an order that depends on their size": (
                own.layout.tp > 2
            )
            for role, own in role_settings(config).items()
        },
        **{
            f"with {role}.layout.cp={own.layout.cp}, which newer Megatrons refuse beside it": own.layout.cp > 1
            for role, own in role_settings(config).items()
        },
        **{
            f"on {device.name}, for which vLLM has no such kernels": (device.capability or 8.0) < 8.0
            for device in known_devices()
        },
    }
    if found := next((what for what, hinders in hindrances.items() if hinders), None):
        raise ConfigError(f"run.batch_invariant: got true {found}; change either")


# --- RL training


def check_steps(config: Config) -> None:
    """Raise ConfigError for a run that does nothing, and for profiled steps that it does not have."""
    total_steps, profiled = config.trainer.total_steps, config.logging.profile_steps
    if total_steps == 0 and not config.data.val:
        raise ConfigError(
            "trainer.total_steps: got 0, which only validates, but data.val is empty; set data.val, or take more steps"
        )
    if profiled is not None and not 1 <= profiled[0] <= profiled[1] <= total_steps:
        raise ConfigError(
            f"logging.profile_steps: got {list(profiled)}, expected first and last step with "
            f"1 <= first <= last <= trainer.total_steps={total_steps}"
        )


def check_cpo_of_run(config: Config) -> None:
    """Raise ConfigError for log-probs that CPO cannot compare, and for a prompt that no other lends its hint."""
    top_k, cpo = config.rollout.top_k, config.algo.cpo
    if top_k != -1 and cpo.method != "none":
        raise ConfigError(
            f"rollout.top_k: got {top_k}, but algo.cpo.method={cpo.method} compares log-probs over the whole "
            "vocabulary; set rollout.top_k=-1 and rollout.top_p=1.0"
        )
    if cpo.shuffled_baseline and config.trainer.prompts_per_step == 1:
        raise ConfigError(
            "algo.cpo.shuffled_baseline: got true with trainer.prompts_per_step=1, where no other prompt lends its "
            "hint and CPO would change nothing; raise prompts_per_step, or set it to false"
        )


def check_reward_model(config: Config) -> None:
    """Raise ConfigError if a reward model is asked and there is none."""
    if config.rewards.uses("model") and config.reward_model.model_path is None and config.reward_model.lora is None:
        raise ConfigError(
            f"reward_model.model_path: is not set, but rewards.manager={config.rewards.manager} asks a reward model; "
            "set it to a directory with score.weight, such as RUN/export of megarl train-reward, or change the manager"
        )


def check_scores_for_keep_best(config: Config) -> None:
    """Raise ConfigError unless an RL run has the scores by which checkpoints are kept, or the run ends."""
    checkpoint, validation, every = config.checkpoint, config.validation, config.validation.every_steps
    if checkpoint.keep_best:
        _require_validated_checkpoints(checkpoint, "data.val", config.data.val, "validation.every_steps", every)
    elif validation.stop_after_zeros is None:
        return
    if not config.data.val:
        raise ConfigError("validation.stop_after_zeros: is set, but data.val is empty; set data.val, or leave it out")
    if checkpoint.best_metric.endswith("_greedy") and not validation.greedy:
        raise ConfigError(f"checkpoint.best_metric: got {checkpoint.best_metric}, but validation.greedy=false; set it")


def check_group_scores(config: Config) -> None:
    """Raise ConfigError for rewards that compare the samples of a group where groups have one sample."""
    rewards = config.rewards
    if config.rollout.num_samples > 1:
        return
    for judge in rewards.asked_judges():
        if rewards.judges[judge].mode == "pairwise":
            raise ConfigError(
                f"rewards.judges.{judge}.mode: got 'pairwise' with rollout.num_samples=1, so there is nothing to "
                "compare; raise rollout.num_samples, or set mode=pointwise"
            )
    for name, part in rewards.mixture.items():
        if part.transform == "group_zscore":
            raise ConfigError(
                f"rewards.hybrid.parts.{name}.transform: got 'group_zscore' with rollout.num_samples=1, whose z-scores "
                "are all 0; raise rollout.num_samples, or choose another transform"
            )


def check_policy_judges(config: Config) -> None:
    """Raise ConfigError for a judge that asks the policy in a run whose samples are replayed, without engines."""
    for name, judge in config.rewards.judges.items():
        if judge.use_policy and config.rollout.source != "vllm":
            raise ConfigError(
                f"rewards.judges.{name}.use_policy: got true with rollout.source={config.rollout.source}, which may "
                "have no engines; set rollout.source=vllm"
            )


def check_role_layouts(config: Config) -> None:
    """Raise ConfigError for a role whose own layout needs more ranks than the actor's."""
    size = config.actor.layout.world_size
    for role, settings in role_settings(config).items():
        if (layout := settings.layout).world_size > size:
            raise ConfigError(
                f"{role}.layout: tp {layout.tp} × pp {layout.pp} × cp {layout.cp} × dp {layout.dp} = "
                f"{layout.world_size} ranks, expected <= {size}, those of actor.layout, whose devices they use; "
                f"lower it, raise actor.layout, or set {role}.layout=null"
            )


def check_reference_reset(config: Config) -> None:
    """Raise ConfigError for a reference that cannot become the policy: each rank copies the weights that it holds."""
    own, actor, every = config.reference, config.actor, config.algo.kl.reset_every_steps
    given = {"reference.model_path": own.model_path, "reference.layout": own.layout, "actor.lora": actor.lora}
    for key, got in given.items():
        if every is not None and got not in (None, config.model.path, actor.layout):
            raise ConfigError(
                f"algo.kl.reset_every_steps: got {every} with {key}, but only a whole model on the actor's ranks "
                f"can become the policy; set {key}=null"
            )


def check_actor_trains(config: Config) -> None:
    """Raise ConfigError if the critic alone is trained in all steps; total_steps=0 is allowed."""
    trainer, critic = config.trainer, config.critic
    if not trainer.total_steps:
        return
    if critic.warmup_steps > trainer.total_steps:
        raise ConfigError(
            f"critic.warmup_steps: got {critic.warmup_steps}, expected <= trainer.total_steps={trainer.total_steps}, "
            "or the actor never trains; shorten it or lengthen the run"
        )


# --- supervised training


def check_supervised(config: Config, name: str) -> None:
    """Raise ConfigError unless a supervised run that keeps the best checkpoints has scores for them.

    name: the section of the command, such as `sft`.
    """
    run: SftConfig | PairsConfig = getattr(config, name)
    if config.checkpoint.keep_best:
        every_key = f"{name}.val_every_steps"
        _require_validated_checkpoints(config.checkpoint, f"{name}.val", run.val, every_key, run.val_every_steps)


def check_no_reward_model(config: Config) -> None:
    """Raise ConfigError for settings of a reward model where the one that is trained has those of the actor."""
    if config.reward_model != RewardModelConfig():
        raise ConfigError(
            "reward_model: is for runs that are judged by a reward model; train-reward trains model.path with the "
            "settings of actor: set those, and leave reward_model out"
        )


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


_SECTIONS = ("run", "model", "actor", "cluster")
_RULES: tuple[Rule, ...] = (check_precision, check_batch_invariance, check_lora, check_optimizers, check_trainer_nodes)
_ROWS: tuple[Rule, ...] = (*_RULES, check_row_fits_micro_batch, check_row_fits_engine)
_SAMPLES: tuple[Rule, ...] = (check_quantization, check_lora_sync)
_ENGINES: tuple[Rule, ...] = (check_engines, check_cache, check_sync)

check_train = CommandCheck(
    sections=(
        *_SECTIONS,
        *("data", "reference", "teacher", "teachers", "critic", "reward_model", "rollout", "rewards", "placement"),
        *("environment", "sync", "trainer", "validation"),
    ),
    rules=(
        *_ROWS,
        check_steps,
        check_scores_for_keep_best,
        check_cpo_of_run,
        check_group_scores,
        check_policy_judges,
        check_role_layouts,
        check_reference_reset,
        check_reward_model,
        check_distill,
        check_images,
        check_written,
        check_replayed_routing,
        check_actor_trains,
        check_schedule,
        *_SAMPLES,
        *_ENGINES,
    ),
)
# A user's own loop brings its data, its rewards and its length.
check_session = CommandCheck(
    sections=(*_SECTIONS, "reference", "critic", "rollout", "placement", "sync"),
    rules=(*_ROWS, check_images, check_role_layouts, check_replayed_routing, *_SAMPLES, *_ENGINES),
)
check_sft = CommandCheck(
    sections=(*_SECTIONS, "sft", "teacher", "algo.distill"),
    rules=(
        *(*_RULES, check_sft_row_fits_micro_batch, check_distill, check_distill_of_sft, check_images, check_written),
        partial(check_supervised, name="sft"),
    ),
)
check_train_reward = CommandCheck(
    sections=(*_SECTIONS, "train_reward"),
    rules=(
        *_ROWS,
        check_no_images,
        check_no_reward_model,
        check_pair_fits_micro_batch,
        partial(check_supervised, name="train_reward"),
    ),
)
check_train_preference = CommandCheck(
    sections=(*_SECTIONS, "train_preference", "reference", "critic", "reward_model"),
    rules=(
        *_ROWS,
        check_images,
        check_responses_fit_micro_batch,
        check_role_layouts,
        partial(check_supervised, name="train_preference"),
    ),
)
# An evaluation uses engines, but does not train.
check_eval = CommandCheck(
    sections=("run", "actor.layout", "environment", "rewards", "rollout.engine", "placement", "sync", "cluster"),
    rules=(
        check_batch_invariance,
        partial(check_images, trains=False),
        check_row_fits_engine,
        check_lora,
        check_trainer_nodes,
        *_ENGINES,
    ),
)
# A reward service has no model and no data.
check_serve_reward = CommandCheck(sections=("rewards",))

# The commands that train, and the check of a configuration for each.
TRAINING_CHECKS: Mapping[str, CommandCheck] = {
    "train": check_train,
    "sft": check_sft,
    "train-reward": check_train_reward,
    "train-preference": check_train_preference,
}
