"""Open and check what supervised training reads (demonstrations or preference pairs) before any process starts."""

from dataclasses import dataclass, replace
from typing import TypeVar

from megarl.algos.preference import preference_objective
from megarl.cluster.roles import reference_role, reward_role
from megarl.config.check import check_sft, check_train_preference, check_train_reward
from megarl.config.check_batches import max_row_tokens
from megarl.config.schema import Config, SftConfig, TrainPreferenceConfig, TrainRewardConfig
from megarl.data.chat import load_tokenizer
from megarl.data.demonstrations import SftDataset
from megarl.data.preferences import PreferenceDataset, ResponsePairDataset
from megarl.data.sampler import require_batch
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

    @property
    def warnings(self) -> list[str]:
        """Return a warning for each data set from which rows over a length limit were dropped."""
        sets = {"sft.train": self.train, "sft.val": self.val}
        return [
            f"{key}: dropped {data.num_dropped} of {data.num_dropped + len(data)} rows over data.max_prompt_tokens or "
            "rollout.max_response_tokens"
            for key, data in sets.items()
            if data is not None and data.num_dropped
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainRewardInputs:
    """The checked inputs of `megarl train-reward`: all that it needs besides a cluster."""

    config: Config
    train: PreferenceDataset
    val: PreferenceDataset | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainPreferenceInputs:
    """The checked inputs of `megarl train-preference`: all that it needs besides a cluster."""

    config: Config
    train: ResponsePairDataset
    val: ResponsePairDataset | None


def _in_steps(settings: Settings, num_examples: int) -> Settings:
    """Check that the examples fill a batch, and express a length in epochs as a number of optimizer steps."""
    require_batch(num_examples, settings.batch_size)
    if settings.total_epochs is None:
        return settings
    steps = settings.total_epochs * (num_examples // settings.batch_size)
    return replace(settings, total_steps=steps, total_epochs=None)


def open_sft_inputs(config: Config) -> SftInputs:
    """Check the configuration, the model and the data of a supervised run."""
    check_sft(config)
    config = with_local_models(config)
    open_model(config)
    tokenizer = load_tokenizer(config.model.path, arguments=config.data.chat_template)
    train, val = (
        SftDataset(
            files,
            tokenizer,
            max_prompt_tokens=config.data.max_prompt_tokens,
            max_response_tokens=config.rollout.max_response_tokens,
            settings=config.sft,
        )
        if files
        else None
        for files in (config.sft.train, config.sft.val)
    )
    assert train is not None, "the configuration was checked"
    config = replace(config, sft=_in_steps(config.sft, len(train)))
    check_sft(config)
    return SftInputs(config=config, train=train, val=val)


def open_train_reward_inputs(config: Config) -> TrainRewardInputs:
    """Check the configuration, the model and the pairs of a reward model's training."""
    check_train_reward(config)
    config = with_local_models(config)
    tokenizer = load_tokenizer(config.model.path, arguments=config.data.chat_template)
    check_role_models(config, [reward_role(config)], tokenizer)
    train, val = (
        PreferenceDataset(files, tokenizer, max_tokens=max_row_tokens(config)) if files else None
        for files in (config.train_reward.train, config.train_reward.val)
    )
    assert train is not None, "the configuration was checked"
    config = replace(config, train_reward=_in_steps(config.train_reward, len(train)))
    check_train_reward(config)
    return TrainRewardInputs(config=config, train=train, val=val)


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
        )
        if files
        else None
        for files in (config.train_preference.train, config.train_preference.val)
    )
    assert train is not None, "the configuration was checked"
    config = replace(config, train_preference=_in_steps(config.train_preference, len(train)))
    check_train_preference(config)
    return TrainPreferenceInputs(config=config, train=train, val=val)
