"""Open and check what supervised training reads (demonstrations or preference pairs) before any process starts."""

from dataclasses import dataclass, replace
from typing import TypeVar

from megarl.algos.preference import BATCH_KL, preference_objective
from megarl.cluster.roles import reference_role, reward_role
from megarl.config.check import check_sft, check_train_preference, check_train_reward
from megarl.config.check_batches import max_row_tokens
from megarl.config.schema import Config, SftConfig, TrainPreferenceConfig, TrainRewardConfig
from megarl.data.chat import load_tokenizer
from megarl.data.demonstrations import SftDataset
from megarl.data.preferences import PreferenceDataset, ResponsePairDataset
from megarl.data.sampler import require_batch
from megarl.errors import DataError
from megarl.train.inputs import check_role_models, open_model
from megarl.types import Score
from megarl.weights.hub import with_local_models

Settings = TypeVar("Settings", SftConfig, TrainRewardConfig, TrainPreferenceConfig)


@dataclass(frozen=True, slots=True, kw_only=True)
class SftInputs:
    """The checked inputs of `megarl sft`: all that it needs besides a cluster."""

    config: Config
    train: SftDataset
    val: SftDataset | None
    # How the length of the run came out of a number of epochs.
    notes: tuple[str, ...] = ()

    @property
    def warnings(self) -> list[str]:
        """Return a warning for each data set that lost rows, or ends of rows, to the length limit."""
        found = []
        for key, data in (("sft.train", self.train), ("sft.val", self.val)):
            if data is not None and (data.num_dropped or data.num_cut):
                lost = f"dropped {data.num_dropped} and cut {data.num_cut}"
                found.append(f"{key}: {lost} of {data.num_dropped + len(data)} rows over {data.limits}")
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainRewardInputs:
    """The checked inputs of `megarl train-reward`: all that it needs besides a cluster."""

    config: Config
    train: PreferenceDataset
    val: PreferenceDataset | None
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainPreferenceInputs:
    """The checked inputs of `megarl train-preference`: all that it needs besides a cluster."""

    config: Config
    train: ResponsePairDataset
    val: ResponsePairDataset | None
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


def in_steps(settings: Settings, num_examples: int) -> tuple[Settings, tuple[str, ...]]:
    """Check that the examples fill a batch, and turn `total_epochs` into a number of optimizer steps.

    Every batch has `batch_size` examples. One that starts at the end of an epoch is filled from the next epoch, so no
    examples are left out but those after the last full batch of the last epoch. Returned notes give the number of steps
    and of examples left out.
    """
    require_batch(num_examples, settings.batch_size)
    if (epochs := settings.total_epochs) is None:
        return settings, ()
    steps, left = divmod(epochs * num_examples, settings.batch_size)
    left_out = f"; the last {left} of the last epoch are left out" if left else ""
    note = f"{epochs} epochs of {num_examples} examples are {steps} steps of {settings.batch_size}{left_out}"
    return replace(settings, total_steps=steps, total_epochs=None), (note,)


def open_sft_inputs(config: Config) -> SftInputs:
    """Check the configuration, the model and the data of a supervised run."""
    check_sft(config)
    config = with_local_models(config)
    open_model(config, for_sft=True)
    tokenizer = load_tokenizer(config.model.path, arguments=config.data.chat_template)
    train, val = (
        SftDataset(
            files,
            tokenizer,
            max_prompt_tokens=config.data.max_prompt_tokens,
            max_response_tokens=config.rollout.max_response_tokens,
            settings=config.sft,
            form=config.data,
        )
        if files
        else None
        for files in (config.sft.train, config.sft.val)
    )
    assert train is not None, "the configuration was checked"
    settings, notes = in_steps(config.sft, len(train))
    config = replace(config, sft=settings)
    check_sft(config)
    return SftInputs(config=config, train=train, val=val, notes=notes)


def dropped_pairs(section: str, **sets: PreferenceDataset | ResponsePairDataset | None) -> tuple[str, ...]:
    """Return a warning for each data set that left out pairs over the length limits."""
    return tuple(
        f"{section}.{name}: dropped {data.num_dropped} of {data.num_dropped + len(data)} pairs over "
        "data.max_prompt_tokens or rollout.max_response_tokens"
        for name, data in sets.items()
        if data is not None and data.num_dropped
    )


def open_train_reward_inputs(config: Config) -> TrainRewardInputs:
    """Check the configuration, the model and the pairs of a reward model's training."""
    check_train_reward(config)
    config = with_local_models(config)
    tokenizer = load_tokenizer(config.model.path, arguments=config.data.chat_template)
    check_role_models(config, [reward_role(config)], tokenizer)
    train, val = (
        PreferenceDataset(files, tokenizer, max_tokens=max_row_tokens(config), on_long=config.train_reward.on_long)
        if files
        else None
        for files in (config.train_reward.train, config.train_reward.val)
    )
    assert train is not None, "the configuration was checked"
    settings, notes = in_steps(config.train_reward, len(train))
    config = replace(config, train_reward=settings)
    check_train_reward(config)
    warnings = dropped_pairs("train_reward", train=train, val=val)
    return TrainRewardInputs(config=config, train=train, val=val, notes=notes, warnings=warnings)


def open_train_preference_inputs(config: Config) -> TrainPreferenceInputs:
    """Check the configuration, the models and the pairs of a policy's training on preferences."""
    check_train_preference(config)
    config = with_local_models(config)
    objective = preference_objective(config.train_preference)
    open_model(config)
    tokenizer = load_tokenizer(config.model.path, arguments=config.data.chat_template)
    if Score.REF_LOGPROBS in objective.reads:
        check_role_models(config, [reference_role(config)], tokenizer)
    train, val = (
        ResponsePairDataset(
            files,
            tokenizer,
            max_prompt_tokens=config.data.max_prompt_tokens,
            max_response_tokens=config.rollout.max_response_tokens,
            on_long=config.train_preference.on_long,
        )
        if files
        else None
        for files in (config.train_preference.train, config.train_preference.val)
    )
    assert train is not None, "the configuration was checked"
    if val is not None and len(val) == 1 and BATCH_KL in objective.reads:
        raise DataError(
            f"train_preference.val: has one pair, but train_preference.objective={config.train_preference.objective} "
            "estimates a KL with the responses of other pairs; hold out more, or set train_preference.val=[]"
        )
    settings, notes = in_steps(config.train_preference, len(train))
    config = replace(config, train_preference=settings)
    check_train_preference(config)
    warnings = dropped_pairs("train_preference", train=train, val=val)
    return TrainPreferenceInputs(config=config, train=train, val=val, notes=notes, warnings=warnings)
