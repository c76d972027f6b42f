"""Open and check everything that a run reads before any process starts, so that mistakes cost nothing."""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from megarl.algos.build import algorithm_of
from megarl.algos.filters import check_filter_ranges
from megarl.algos.validate_rewards import reward_warnings
from megarl.cluster.roles import model_key, roles_of
from megarl.config.batches import max_hinted_row_tokens, max_row_terms, max_row_tokens
from megarl.config.check import check_train
from megarl.config.check_distill import teacher_of, teachers_of
from megarl.config.check_model import check_model
from megarl.config.check_optimizers import warmup_warnings
from megarl.config.model_names import with_models
from megarl.config.schema import Config
from megarl.data.answers import Answers
from megarl.data.chat import load_tokenizer, require_system_turn, require_tools
from megarl.data.hints import HintSurvey, survey_hints
from megarl.data.images import DataImages
from megarl.data.prompts import PromptDataset
from megarl.data.sampler import train_files
from megarl.data.teacher_tokens import TeacherTokens
from megarl.data.vocabulary import Vocabulary, check_vocabulary
from megarl.environments import check_replies, tools_of
from megarl.errors import ConfigError, DataError
from megarl.host.device.platform import platform
from megarl.parallel.backend import flex_obstacle, packs_attention
from megarl.rewards.build import check_ground_truths
from megarl.rewards.routes import filter_ranges
from megarl.rollout.replay import require_records
from megarl.train.forward import HINT_QUANTITIES
from megarl.train.hinted import HintWriter, open_hints
from megarl.train.model_judge import ConversationEncoder, max_reward_tokens
from megarl.train.prompt_queue import open_sampler
from megarl.train.rehearsal import rehearse, rehearse_episodes
from megarl.train.rows import stated_difficulty
from megarl.train.served_teacher import common_tokens, open_teachers
from megarl.types import Algorithm
from megarl.types.messages import Head, Role, RoleSpec
from megarl.weights.families import ModelSpec, read_model_spec
from megarl.weights.hub import local_model
from megarl.weights.peft_files import read_adapters
from megarl.weights.safetensors_headers import check_tensors, model_files, read_header
from megarl.weights.tables import OUTPUT_HEAD, VALUE_HEAD

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainInputs:
    """The checked inputs of `megarl train`: all that it needs besides a cluster."""

    config: Config
    spec: ModelSpec
    tokenizer: "PreTrainedTokenizerBase"
    answers: Answers
    vocabulary: Vocabulary
    algorithm: Algorithm
    roles: tuple[RoleSpec, ...]
    hints: HintWriter | None
    # How the hints of the training prompts fared, if the algorithm has hints.
    hint_survey: HintSurvey | None
    # Encodes samples for the reward model, if the run has one.
    conversations: ConversationEncoder | None
    train: PromptDataset
    val: PromptDataset | None
    # How many tokens, from the first on, the teachers have in common with the policy; None: all.
    teachers: tuple[TeacherTokens, ...] = ()
    common_tokens: int | None = None

    @property
    def warnings(self) -> list[str]:
        """List what is probably a mistake in settings and data, and how many prompts the run leaves out."""
        limit, of_files = self.config.data.max_prompt_tokens, list[str]()
        for data, key in ((self.train, "data.train"), (self.val, "data.val")):
            if data is not None and data.num_dropped:
                of_files.append(f"{key}: dropped {data.num_dropped} prompts over data.max_prompt_tokens={limit}")
            of_files += [] if data is None else data.spelled.warnings(key)
        hints: list[str] = []
        if self.hints is not None and self.hint_survey is not None:
            hints = self.hint_survey.warnings(self.hints.placer)
        of_data = self.config.algo.demonstrations.strategy != "none"
        of_model = [*self.answers.warnings(of_data=of_data), *self.vocabulary.warnings]
        of_teachers = [warning for each in self.teachers for warning in each.warnings]
        return [*setting_warnings(self.config), *of_model, *of_teachers, *of_files, *hints]


def open_model(config: Config, *, for_sft: bool = False) -> ModelSpec:
    """Read config.json and the checkpoint's headers; ConfigError for a model that family or layout cannot take, or
    that cannot read the data's images.
    """
    tower = None if config.data.image_key is None else config.actor.vision.train
    spec = read_model_spec(config.model.path, tower=tower)
    check_model(config, spec.hf_config, for_sft=for_sft, biased_experts=spec.family.linear_biases)
    layers, cp, chosen = range(spec.dims.num_layers), config.actor.layout.cp, config.actor.prefix_attention
    own = chosen == "flex" or any(packs_attention(spec.attention_of(layer), cp=cp) for layer in layers)
    if config.run.batch_invariant and own:
        raise ConfigError(
            f"run.batch_invariant: got true, but with actor.layout.cp={cp} and actor.prefix_attention="
            f"{chosen or 'null'} Transformer Engine does not compute this model's attention, and the results of "
            "megarl's own depend on the rows beside; set it to false"
        )
    if chosen == "flex" and (obstacle := flex_obstacle(spec)) is not None:
        raise ConfigError(
            f"actor.prefix_attention: got flex for a model with {obstacle}; set actor.prefix_attention=null"
        )
    check_tensors(spec.path, spec.expected_tensors(), ignored=spec.ignored_tensors(), copies=spec.copies())
    if config.actor.lora is not None and config.actor.lora.path is not None:
        read_adapters(spec, config.actor.lora)
    return spec


def check_image_engines(config: Config) -> None:
    """Raise ConfigError for images that engines on this device would read otherwise than the trainer."""
    if config.data.image_key is None or platform().name != "cpu":
        return
    family = read_model_spec(config.model.path).family
    if family.sees_whole_images:
        raise ConfigError(
            f"data.image_key: got {config.data.image_key}, but tokens of an image attend to later ones in a model of "
            f"the family {family.name}, and vLLM's attention on CPUs is causal; sample on GPUs, or train on "
            "demonstrations, preferences or a teacher's log-probs, which needs no engine"
        )


def check_role_models(config: Config, roles: Sequence[RoleSpec], tokenizer: "PreTrainedTokenizerBase") -> None:
    """Check the model of every role except the actor against its family, its layout and the tokenizer."""
    for role in roles:
        if role.role is Role.ACTOR:
            continue
        key = model_key(config, role)
        spec = read_model_spec(role.model.path, key, tower=role.tower)
        check_model(config, spec.hf_config, role.role, biased_experts=spec.family.linear_biases)
        ignored = spec.ignored_tensors()
        if role.head is Head.SCALAR:
            if not spec.family.value_architectures:
                raise ConfigError(
                    f"{key}: {role.model.path} is a {spec.family.name} model, of which there is no form with a scalar "
                    "head; name a model of the language model alone"
                )
            expected = spec.expected_tensors(scalar_head=True)
            check_tensors(spec.path, expected, ignored=(*ignored, OUTPUT_HEAD), optional=(VALUE_HEAD,))
            lora = role.settings.lora
            read = {} if lora is None or lora.path is None else read_adapters(spec, lora, scalar_head=True)
            files = model_files(spec.path)
            if not role.trainable and VALUE_HEAD not in read and not any(VALUE_HEAD in read_header(f) for f in files):
                lacking = f"{spec.path} ({key}) has no {VALUE_HEAD}, so every value would be 0"
                if role.role is Role.REWARD:
                    raise ConfigError(f"{key}: {lacking}; set it to the export of a megarl train-reward run")
                raise ConfigError(
                    f"critic.freeze: got true, but {lacking}; set critic.model_path to a critic that a run exported, "
                    "or critic.freeze=false"
                )
        else:
            check_tensors(spec.path, spec.expected_tensors(), ignored=ignored, copies=spec.copies())
        # A reward model may have another tokenizer: it reads conversations.
        if key != "model.path" and role.role is not Role.REWARD:
            # The tokens of teachers are compared on their own.
            if role.role.kind is not Role.TEACHER:
                check_vocabulary(tokenizer, role.model.path, key)
            _require_rows(config, tokenizer, spec, key)


def _require_rows(config: Config, tokenizer: "PreTrainedTokenizerBase", spec: ModelSpec, key: str) -> None:
    """Raise ConfigError for a model that reads the policy's tokens and lacks a row for one that the policy can write.

    Either may have more rows than there are tokens.
    """
    num_rows = read_model_spec(config.model.path).dims.vocab
    last = max(id for id in tokenizer.get_vocab().values() if id < num_rows)
    if last >= spec.dims.vocab:
        raise ConfigError(
            f"{key}: the model in {spec.path} has no row in its embedding for the token "
            f"{tokenizer.convert_ids_to_tokens(last)!r} with id {last} (vocab_size={spec.dims.vocab}), which the "
            f"policy may write (vocab_size={num_rows}); resize its embeddings, or use another model"
        )


def setting_warnings(config: Config) -> list[str]:
    """List settings that are allowed but probably a mistake, without reading any file."""
    critic = config.critic
    rewards = reward_warnings(config.algo, critic_frozen=critic.freeze, critic_warmup_steps=critic.warmup_steps)
    return [*warmup_warnings(config), *rewards]


def open_train_inputs(config: Config) -> TrainInputs:
    """Check configuration, model and data of a reinforcement-learning run; fetch models from the hub if need be."""
    check_train(rehearse(config))
    config = with_models(config, local_model, judges=True)
    spec = open_model(config)
    images = DataImages.of(config.model.path, config.data, config.image_store)
    algorithm = algorithm_of(config, vocab_size=spec.dims.vocab)
    tokenizer = load_tokenizer(config.model.path, arguments=config.data.chat_template)
    answers = Answers.of(config.model, config.rollout, tokenizer)
    vocabulary = Vocabulary.of(tokenizer, spec.dims.vocab)
    roles = roles_of(config, algorithm.requires())
    check_role_models(config, roles, tokenizer)
    asked = teachers_of(config)
    teachers = open_teachers(asked, tokenizer, answers)
    opened = partial(_open_prompts, config, tokenizer, vocabulary, images)
    train = opened(train_files(config.data.train), answers)
    val = opened(config.data.val) if config.data.val else None
    check_askers(config, tokenizer, vocabulary, [each for each in (train, val) if each is not None])
    if (epochs := config.trainer.total_epochs) is not None:
        steps = epochs * (len(train) // config.trainer.prompts_per_step)
        config = replace(config, trainer=replace(config.trainer, total_steps=steps, total_epochs=None))
        check_train(config)
    _require_fitting(config, train)
    open_sampler(config.data, config.trainer, config.rollout.schedule, train, seed=config.run.seed)
    hints, survey = None, None
    if algorithm.requires() & HINT_QUANTITIES or config.algo.distill.teacher == "hint":
        readers = [spec, *(read_model_spec(role.model.path) for role in roles if role.role is Role.TEACHER)]
        positions = min(each.max_positions for each in readers)
        room = max_hinted_row_tokens(config, positions) - config.rollout.max_response_tokens
        hints = open_hints(config.algo, config.environment, tokenizer, room, vocabulary)
        survey = survey_hints(hints.placer, (train[i] for i in range(len(train))))
        survey.require_some(hints.placer)
    judge = next((role for role in roles if role.role is Role.REWARD), None)
    conversations = None if judge is None else _open_conversations(config, judge, tokenizer, answers)
    for data in (train, val):
        if data is not None:
            for prompt in (data[i] for i in range(len(data)) if asked and "teacher" not in asked):
                teacher_of(config, prompt.data_source, prompt.environment)
            check_ground_truths(config.rewards, data, tokenizer)
            if conversations is not None:
                conversations.check(data[i] for i in data.by_roles.values())
    filters = config.algo.filter
    check_filter_ranges(filters, filter_ranges(config.rewards, filters.by, train.data_sources))
    return TrainInputs(
        config=config,
        spec=spec,
        tokenizer=tokenizer,
        answers=answers,
        vocabulary=vocabulary,
        algorithm=algorithm,
        roles=roles,
        train=train,
        val=val,
        hints=hints,
        hint_survey=survey,
        conversations=conversations,
        teachers=teachers,
        common_tokens=common_tokens(asked, spec, roles, teachers),
    )


def check_askers(
    config: Config,
    tokenizer: "PreTrainedTokenizerBase",
    vocabulary: Vocabulary,
    data: Sequence[PromptDataset],
    key: str = "model.path",
) -> None:
    """Raise ConfigError unless the policy can read what environments and judges that ask it write, and environments of
    users pass their trial. key: what named the model, for messages.
    """
    environments = frozenset[str]().union(*(each.environments for each in data))
    check_replies(config.environment, environments, tokenizer)
    rows, images = (each[i] for each in data for i in range(len(each))), data[0].images if data else None
    with nullcontext() if images is None else images.kept_apart():
        for tools in rehearse_episodes(config, rows, environments, images=images).values():
            require_tools(tokenizer, tools)
    asking = [name for name, judge in config.rewards.judges.items() if judge.use_policy]
    for name in asking:
        require_system_turn(tokenizer, config.rewards.judges[name].system, f"rewards.judges.{name}.system")
    vocabulary.require_all(key, [f"environment {name}" for name in sorted(environments)])
    vocabulary.require_all(key, [f"questions of rewards.judges.{name}" for name in asking])


def _require_fitting(config: Config, train: PromptDataset) -> None:
    """Raise DataError if a setting asks for what the training prompts, or recorded rollouts, do not have."""
    if config.rollout.source != "vllm":
        assert config.rollout.replay_dir is not None
        require_records(Path(config.rollout.replay_dir), config.trainer.total_steps)
    if config.algo.cpo.difficulty == "data":
        for i in range(len(train)):
            stated_difficulty(train[i], config.algo.cpo.difficulty_field)
    if config.algo.echo_coef and not train.environments:
        raise ConfigError(
            f"algo.echo_coef: got {config.algo.echo_coef:g}, but no row of data.train has an environment, whose "
            "replies could be predicted; set environment.default, or algo.echo_coef=0"
        )
    if config.algo.off_policy.target_probs and not train.num_target_probs:
        raise DataError(
            "algo.off_policy.target_probs: got true, but no row of data.train has target_probs; add the column, or set "
            "it to false"
        )


def _open_prompts(
    config: Config,
    tokenizer: "PreTrainedTokenizerBase",
    vocabulary: Vocabulary,
    images: DataImages | None,
    files: Sequence[str],
    answers: Answers | None = None,
) -> PromptDataset:
    """Open prompts; with `answers`, which encodes them, those to train on come with demonstrations if they have any."""
    cfg = config.algo.demonstrations
    has_demonstrations = answers is not None and cfg.strategy != "none" and cfg.source == "data"
    return PromptDataset(
        files,
        tokenizer,
        config.data,
        demonstrations=cfg if has_demonstrations else None,
        environment=config.environment,
        tools_of=partial(tools_of, config.environment),
        answers=answers,
        vocabulary=vocabulary,
        cpo=config.algo.cpo,
        images=images,
    )


def _open_conversations(
    config: Config, judge: RoleSpec, tokenizer: "PreTrainedTokenizerBase", answers: Answers
) -> ConversationEncoder:
    """Open the encoder of conversations for the reward model; raise ConfigError if its context is too short for the
    run.

    If the reward model has another tokenizer than the policy, lengths are checked when a sample is encoded.
    """
    path, key = judge.model.path, "reward_model.model_path"
    own = load_tokenizer(path, key)
    if config.data.chat_template and own.chat_template == load_tokenizer(config.model.path).chat_template:
        # The same template, so the arguments of data.chat_template are for it, too.
        own.chat_template = tokenizer.chat_template
    encoder, limit = ConversationEncoder(tokenizer, own, answers), max_reward_tokens(judge)
    spec = read_model_spec(path, key)
    if encoder.num_extra_tokens is None:
        Vocabulary.of(own, spec.dims.vocab, key).require_all(key, ["conversations"])
    else:
        _require_rows(config, tokenizer, spec, key)
    if encoder.num_extra_tokens is not None and max_row_tokens(config) + encoder.num_extra_tokens > limit:
        raise ConfigError(
            f"reward_model.micro_batch_tokens: got room for {limit} tokens and a score, but with its chat template the "
            f"longest conversation has {max_row_terms(config)} + {encoder.num_extra_tokens}; raise it (null: "
            f"actor.micro_batch_tokens), or shorten the two"
        )
    return encoder
