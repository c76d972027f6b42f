"""Everything a run reads, opened and checked before any process starts, so that mistakes cost nothing."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from megarl.algos.build import build_algorithm
from megarl.config.check import check_model, check_sft, check_train
from megarl.config.schema import Config
from megarl.data.chat import load_tokenizer
from megarl.data.mixture import Sampler, prompt_sampler, train_files
from megarl.data.prompts import PromptDataset, SftDataset
from megarl.data.sampler import require_batch
from megarl.errors import DataError
from megarl.parallel.weights.families import ModelSpec, read_model_spec
from megarl.rewards import SCORERS, score
from megarl.rollout.replay import require_records
from megarl.safetensors_map import check_tensors
from megarl.types import Algorithm

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainInputs:
    """What `megarl train` needs besides a cluster."""

    config: Config
    spec: ModelSpec
    tokenizer: "PreTrainedTokenizerBase"
    algorithm: Algorithm
    train: PromptDataset
    val: PromptDataset | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SftInputs:
    """What `megarl sft` needs besides a cluster."""

    config: Config
    spec: ModelSpec
    train: SftDataset


def open_sampler(config: Config, train: PromptDataset) -> Sampler:
    """The order of training prompts. Raises ConfigError if a batch asks for more than there are."""
    return prompt_sampler(
        config.data.train,
        train.num_prompts_by_file,
        batch_size=config.trainer.prompts_per_step,
        seed=config.run.seed,
        shuffle=config.data.shuffle,
    )


def open_model(config: Config) -> ModelSpec:
    """Read config.json and the checkpoint's headers; refuse what does not fit the family or the layout."""
    spec = read_model_spec(config.model.path)
    check_model(config, spec.hf_config)
    check_tensors(spec.path, spec.expected_tensors(), ignored=spec.ignored_tensors())
    return spec


def open_train_inputs(config: Config) -> TrainInputs:
    """Check the configuration, the model and the data of a reinforcement-learning run."""
    check_train(config)
    algorithm = build_algorithm(config.algo, max_response_tokens=config.rollout.max_response_tokens)
    spec = open_model(config)
    tokenizer = load_tokenizer(config.model.path)
    train, val = (
        PromptDataset(
            files,
            tokenizer,
            max_prompt_tokens=config.data.max_prompt_tokens,
            on_long_prompt=config.data.on_long_prompt,
        )
        if files
        else None
        for files in (train_files(config.data.train), config.data.val)
    )
    assert train is not None
    open_sampler(config, train)
    if config.rollout.source == "replay":
        assert config.rollout.replay_dir is not None
        require_records(Path(config.rollout.replay_dir), config.trainer.total_steps)
    for data in (train, val):
        if data is not None:
            check_ground_truths(data)
    return TrainInputs(config=config, spec=spec, tokenizer=tokenizer, algorithm=algorithm, train=train, val=val)


def check_ground_truths(data: PromptDataset) -> None:
    """Judge an empty answer to every prompt: an unknown source or a malformed ground truth shows now."""
    for data_source in sorted(data.data_sources):
        SCORERS.get(data_source)
    for index in range(len(data)):
        prompt = data[index]
        try:
            score(prompt.data_source, "", prompt.ground_truth, prompt.extra_info)
        except DataError as error:
            raise DataError(f"prompt {prompt.uid}: {error}") from error


def open_sft_inputs(config: Config) -> SftInputs:
    """Check the configuration, the model and the data of a supervised run."""
    check_sft(config)
    spec = open_model(config)
    train = SftDataset(
        config.sft.train,
        load_tokenizer(config.model.path),
        max_prompt_tokens=config.data.max_prompt_tokens,
        max_response_tokens=config.rollout.max_response_tokens,
    )
    require_batch(len(train), config.sft.batch_size)
    return SftInputs(config=config, spec=spec, train=train)
