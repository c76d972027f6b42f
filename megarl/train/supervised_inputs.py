"""Open and check what supervised training reads (demonstrations or preference pairs) before any process starts."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Generic, Literal, Protocol, TypeAlias, TypeVar

from megarl.algos.preference import BATCH_KL, preference_objective
from megarl.cluster.roles import reference_role, reward_role, teacher_roles
from megarl.config.batches import max_row_tokens
from megarl.config.check import check_sft, check_train_preference, check_train_reward
from megarl.config.check_distill import teachers_of
from megarl.config.check_optimizers import warmup_warning
from megarl.config.model_names import with_models
from megarl.config.schema import Config, SftConfig, TrainPreferenceConfig, TrainRewardConfig
from megarl.data.answers import Answers
from megarl.data.chat import load_tokenizer
from megarl.data.demonstrations import SftDataset
from megarl.data.images import DataImages
from megarl.data.preferences import PreferenceDataset, ResponsePairDataset
from megarl.data.sampler import require_batch
from megarl.data.special_tokens import SpelledSpecialTokens
from megarl.data.vocabulary import Vocabulary
from megarl.errors import DataError
from megarl.train.inputs import check_role_models, open_model
from megarl.train.served_teacher import common_tokens, open_teachers
from megarl.types import Row, TokenQuantity
from megarl.weights.families import read_model_spec
from megarl.weights.hub import local_model


class Examples(Protocol):
    """A data set of supervised training, whose examples are one row each or, as preference pairs, two.

    num_dropped: how many examples of the files were left out because they are over a length limit.
    """

    num_dropped: int
    spelled: SpelledSpecialTokens

    def __len__(self) -> int:
        """Return the number of examples."""

    def rows(self, indices: Sequence[int]) -> list[Row]:
        """Return the rows of the examples with these indices."""


Data = TypeVar("Data", bound=Examples, covariant=True)
Settings = TypeVar("Settings", SftConfig, TrainRewardConfig, TrainPreferenceConfig)
Section: TypeAlias = Literal["sft", "train_reward", "train_preference"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SupervisedInputs(Generic[Data]):
    """The checked inputs of a supervised command: all that it needs besides a cluster.

    config: in it, a length in epochs has become a number of steps; `notes` say how. val: the held-out examples, if
    there are any. warnings: what is most likely not as the user wishes. common_tokens, images: as in
    `TrainInputs`.
    """

    config: Config
    train: Data
    val: Data | None
    notes: tuple[str, ...]
    warnings: tuple[str, ...]
    common_tokens: int | None = None
    images: DataImages | None = None


def in_steps(settings: Settings, num_examples: int, key: str) -> tuple[Settings, tuple[str, ...]]:
    """Return the settings with `total_epochs` turned into optimizer steps, and notes; check that a batch can be filled.

    Every batch has `batch_size` examples. If an epoch ends within a batch, the next epoch fills it; only at the end of
    the last epoch are examples left out, if they do not fill a batch. The notes say how many steps there are, and how
    many examples are left out. key: that of the settings.
    """
    require_batch(num_examples, settings.batch_size, f"{key}.batch_size")
    if (epochs := settings.total_epochs) is None:
        return settings, ()
    steps, left = divmod(epochs * num_examples, settings.batch_size)
    left_out = f"; the last {left} of the last epoch are left out" if left else ""
    note = f"{epochs} epochs of {num_examples} examples are {steps} steps of {settings.batch_size}{left_out}"
    return replace(settings, total_steps=steps, total_epochs=None), (note,)


def open_sft_inputs(config: Config) -> SupervisedInputs[SftDataset]:
    """Check the configuration, the model and the data of a supervised run."""
    check_sft(config)
    config = with_models(config, local_model)
    spec = open_model(config, for_sft=True)
    images = DataImages.of(config.model.path, config.data, config.image_store)
    tokenizer = load_tokenizer(config.model.path, arguments=config.data.chat_template)
    answers = Answers.of(config.model, config.rollout, tokenizer)
    vocabulary = Vocabulary.of(tokenizer, spec.dims.vocab)
    read = partial(
        SftDataset,
        tokenizer=tokenizer,
        max_prompt_tokens=config.data.max_prompt_tokens,
        max_response_tokens=config.rollout.max_response_tokens,
        settings=config.sft,
        form=config.data,
        answers=answers,
        vocabulary=vocabulary,
        images=images,
    )
    asked, roles = teachers_of(config), teacher_roles(config)
    teachers = open_teachers(asked, tokenizer, answers)
    check_role_models(config, roles, tokenizer)
    warnings = [*answers.warnings(), *vocabulary.warnings, *(text for each in teachers for text in each.warnings)]
    checked = _checked(config, "sft", check_sft, _read_both(config.sft, read), _lost_rows, warnings)
    return replace(checked, common_tokens=common_tokens(asked, spec, roles, teachers), images=images)


def open_train_reward_inputs(config: Config) -> SupervisedInputs[PreferenceDataset]:
    """Check the configuration, the model and the pairs of a reward model's training."""
    check_train_reward(config)
    config = with_models(config, local_model)
    tokenizer = load_tokenizer(config.model.path, arguments=config.data.chat_template)
    check_role_models(config, [reward_role(config)], tokenizer)
    vocabulary = Vocabulary.of(tokenizer, read_model_spec(config.model.path).dims.vocab)
    settings, max_tokens = config.train_reward, max_row_tokens(config)
    read = partial(
        PreferenceDataset,
        tokenizer=tokenizer,
        max_tokens=max_tokens,
        on_long=settings.on_long,
        form=config.data,
        vocabulary=vocabulary,
    )
    sets, warnings = _read_both(settings, read), vocabulary.warnings
    return _checked(config, "train_reward", check_train_reward, sets, _dropped_pairs, warnings)


def open_train_preference_inputs(config: Config) -> SupervisedInputs[ResponsePairDataset]:
    """Check the configuration, the models and the pairs of a policy's training on preferences."""
    check_train_preference(config)
    config = with_models(config, local_model)
    settings = config.train_preference
    objective = preference_objective(settings)
    spec = open_model(config)
    images = DataImages.of(config.model.path, config.data, config.image_store)
    tokenizer = load_tokenizer(config.model.path, arguments=config.data.chat_template)
    if TokenQuantity.REF_LOGPROBS in objective.reads:
        check_role_models(config, [reference_role(config)], tokenizer)
    answers = Answers.of(config.model, config.rollout, tokenizer)
    vocabulary = Vocabulary.of(tokenizer, spec.dims.vocab)
    read = partial(
        ResponsePairDataset,
        tokenizer=tokenizer,
        max_prompt_tokens=config.data.max_prompt_tokens,
        max_response_tokens=config.rollout.max_response_tokens,
        on_long=settings.on_long,
        form=config.data,
        answers=answers,
        vocabulary=vocabulary,
        images=images,
    )
    train, val = _read_both(settings, read)
    if val is not None and len(val) == 1 and BATCH_KL in objective.reads:
        raise DataError(
            f"train_preference.val: has one pair, but train_preference.objective={settings.objective} "
            "estimates a KL with the responses of other pairs; hold out more, or set train_preference.val=[]"
        )
    sets, warnings = (train, val), [*answers.warnings(), *vocabulary.warnings]
    checked = _checked(config, "train_preference", check_train_preference, sets, _dropped_pairs, warnings)
    return replace(checked, images=images)


def _read_both(
    settings: SftConfig | TrainRewardConfig | TrainPreferenceConfig, read: Callable[[Sequence[str]], Data]
) -> tuple[Data, Data | None]:
    """Read the examples to train on, of which the checks require some, and the held-out ones if there are any."""
    return read(settings.train), read(settings.val) if settings.val else None


def _checked(
    config: Config,
    section: Section,
    check: Callable[[Config], None],
    sets: tuple[Data, Data | None],
    lost: Callable[[str, Data], Iterator[str]],
    of_model: Iterable[str] = (),
) -> SupervisedInputs[Data]:
    """Express the length in steps, check again the rules that read `total_steps`, and make the inputs.

    lost: yields warnings about a data set, given the key of its files. of_model: warnings about the model.
    """
    train, val = sets
    settings, notes = in_steps(getattr(config, section), len(train), section)
    config = replace(config, **{section: settings})
    check(config)
    warnings = [*of_model, *warmup_warning(config.actor.optimizer, getattr(config, section).total_steps, "actor")]
    for key, data in ((f"{section}.train", train), (f"{section}.val", val)):
        if data is not None:
            warnings += [*lost(key, data), *data.spelled.warnings(key)]
    return SupervisedInputs(config=config, train=train, val=val, notes=notes, warnings=tuple(warnings))


def _lost_rows(key: str, data: SftDataset) -> Iterator[str]:
    if data.num_dropped or data.num_cut:
        lost = f"dropped {data.num_dropped} and cut {data.num_cut}"
        yield f"{key}: {lost} of {data.num_dropped + len(data)} rows over {data.limits}"


def _dropped_pairs(key: str, data: Examples) -> Iterator[str]:
    if data.num_dropped:
        yield (
            f"{key}: dropped {data.num_dropped} of {data.num_dropped + len(data)} pairs over "
            "data.max_prompt_tokens or rollout.max_response_tokens"
        )
