"""Open and check what a session reads before any process starts, and check each call before ranks get it."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch

from megarl.algos.build import algorithm_of, check_loop
from megarl.algos.composed import ComposedAlgorithm
from megarl.algos.corrections import CORRECTION
from megarl.algos.objectives import ALGORITHM, ValueLoss, objective_by_name
from megarl.cluster.roles import reference_role, roles_of
from megarl.config.check import check_session
from megarl.config.model_names import with_models
from megarl.config.schema import Config
from megarl.data.answers import Answers
from megarl.data.chat import encode_chats, load_tokenizer
from megarl.data.images import DataImages, read_parts
from megarl.data.prompts import PromptDataset
from megarl.data.sampler import train_files
from megarl.data.vocabulary import Vocabulary
from megarl.environments import tools_of
from megarl.errors import ConfigError, DataError
from megarl.rollout.source import SamplingPlan
from megarl.train.inputs import check_image_engines, check_role_models, open_model
from megarl.train.passes import CountedObjective
from megarl.train.rehearsal import rehearse
from megarl.types import (
    PAIRS,
    Algorithm,
    AlgoState,
    Denominators,
    FloatArray,
    Message,
    PolicyOutputs,
    Prompt,
    Row,
    RowImage,
    ValueOutputs,
    row_batch,
)
from megarl.types.messages import Role, RoleSpec
from megarl.weights.families import ModelSpec
from megarl.weights.hub import local_model

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# A prompt: a text of a user's turn, messages of a chat (with images: lists of parts), token ids, or a prompt of the
# run's data.
PromptLike: TypeAlias = str | Sequence[Mapping[str, Any]] | Sequence[int] | Prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionInputs:
    """The checked inputs of a session; prompts: those of `data.train`, None without any. images: None: texts alone."""

    config: Config
    spec: ModelSpec
    tokenizer: "PreTrainedTokenizerBase"
    answers: Answers
    vocabulary: Vocabulary
    algorithm: Algorithm
    roles: tuple[RoleSpec, ...]
    prompts: PromptDataset | None
    images: DataImages | None = None

    def encoded(self, prompts: Sequence[PromptLike], *, draw: int) -> Iterator[Prompt]:
        """Yield prompts in any form as `Prompt`. DataError: one is too long, or has a token that the model lacks."""
        limit = self.config.data.max_prompt_tokens
        for i, given in enumerate(prompts):
            prompt, uid, shown = given, f"session:{draw}:{i}", tuple[RowImage, ...]()
            if not isinstance(prompt, Prompt):
                turns: Any = [{"role": "user", "content": given}] if isinstance(given, str) else list(prompt)
                if turns and isinstance(turns[0], Mapping):
                    messages = [self._message(turn) for turn in turns]
                    (turns,) = encode_chats(self.tokenizer, [messages], places=[uid])
                    if self.images is not None:
                        turns, _, shown = self.images.expand(turns, messages, uid)
                self.vocabulary.require(turns, uid)
                ids = tuple(map(int, turns))
                prompt = Prompt(uid=uid, token_ids=ids, data_source="session", ground_truth="", images=shown)
            if not 1 <= (got := len(prompt.token_ids)) <= limit:
                raise DataError(
                    f"prompt {prompt.uid}: has {got} tokens, expected 1 to data.max_prompt_tokens={limit}; change "
                    "either"
                )
            yield prompt

    def _message(self, turn: Mapping[str, Any]) -> Message:
        content, images = turn["content"], tuple[str, ...]()
        if self.images is not None and isinstance(content, list):
            content, images = read_parts(content, self.images.read)
        return Message(role=turn["role"], content=content, images=images)

    def objective(self, given: str | CountedObjective, role: Role) -> CountedObjective:
        """Return an objective by its name, or as given. `algorithm` is a critic's value loss for a critic."""
        if role is Role.CRITIC and given == ALGORITHM:
            return ValueLoss(clip=self.config.critic.value_clip)
        if not isinstance(given, str):
            return given
        assert isinstance(self.algorithm, ComposedAlgorithm)
        found: CountedObjective = objective_by_name(given, self.algorithm)
        return found

    def sampling_plan(
        self, n: int | None, max_tokens: int | None, draw: int, changed: Mapping[str, Any]
    ) -> SamplingPlan:
        """Return how a call samples: as the run's settings say, but for what the call changes."""
        rollout = self.config.rollout
        sampling = rollout.sampling(self.answers.stop_tokens.stop_token_ids)
        limit = rollout.max_response_tokens if max_tokens is None else max_tokens
        if not 1 <= limit <= rollout.max_response_tokens:
            raise ConfigError(
                f"max_tokens: got {limit}, expected 1 to rollout.max_response_tokens={rollout.max_response_tokens}; "
                "engines and micro-batches are made for that: raise the setting"
            )
        if unknown := changed.keys() - set(sampling.__slots__):
            raise ConfigError(
                f"sample: got {sorted(unknown)[0]}, expected one of {', '.join(sampling.__slots__)}; correct it"
            )
        sampling = replace(sampling, **changed)
        return SamplingPlan(
            step=draw,
            num_samples=rollout.num_samples if n is None else n,
            sampling=sampling,
            max_response_tokens=limit,
            run_seed=self.config.run.seed,
            with_nucleus=sampling.top_k != -1,
            may_move=True,
        )

    def check_rows(self, rows: Sequence[Row]) -> None:
        """Raise DataError for rows that are too long, have unknown tokens, or differ in their quantities."""
        limit, vocab = self.config.actor.micro_batch_tokens, self.spec.dims.vocab
        if not rows:
            raise DataError("rows: got none, expected at least one; call this with rows only")
        names = rows[0].quantities.keys()
        for row in rows:
            if row.num_tokens > limit:
                raise DataError(
                    f"row {row.label}: has {row.num_tokens} tokens, expected at most actor.micro_batch_tokens={limit}; "
                    "shorten it, or raise the setting"
                )
            ids = row.token_ids if row.labels is None else np.concatenate([row.token_ids, row.labels])
            if not 0 <= ids.min() <= ids.max() < vocab:
                raise DataError(
                    f"row {row.label}: has token ids from {ids.min()} to {ids.max()}, expected 0 to {vocab - 1}; "
                    "encode it with this model's tokenizer"
                )
            if differing := sorted(row.quantities.keys() ^ names):
                raise DataError(
                    f"row {row.label}: {differing} are quantities of some rows only; give them to all rows of a call"
                )

    def check_pairs(self, rows: Sequence[Row]) -> None:
        """Raise DataError for rows that are not pairs, or of which a micro-batch cannot hold both."""
        limit, half = self.config.actor.micro_batch_tokens, len(rows) // 2
        if len(rows) % 2:
            raise DataError(
                f"rows: got {len(rows)} for an objective over pairs, expected an even number: all chosen rows, then "
                "all rejected ones in the same order; give the two of each pair to one call"
            )
        for one, other in zip(rows[:half], rows[half:], strict=True):
            if (got := one.num_tokens + other.num_tokens) > limit:
                raise DataError(
                    f"rows {one.label} and {other.label}: have {got} tokens, expected at most "
                    f"actor.micro_batch_tokens={limit} for a pair; shorten them, or raise the setting"
                )


def open_session_inputs(config: Config, *, with_engines: bool, with_reference: bool) -> SessionInputs:
    """Check the configuration and the model of a session, and its prompts if `data.train` names some."""
    check_session(rehearse(config))
    check_loop(config)
    config = with_models(config, local_model)
    spec = open_model(config, for_sft=not with_engines)
    if with_engines:
        check_image_engines(config)
    if (images := DataImages.of(config.model.path, config.data, config.image_store)) is not None:
        images.keeps = True
    algorithm = algorithm_of(config, vocab_size=spec.dims.vocab)
    tokenizer = load_tokenizer(config.model.path, arguments=config.data.chat_template)
    answers = Answers.of(config.model, config.rollout, tokenizer)
    vocabulary = Vocabulary.of(tokenizer, spec.dims.vocab)
    # A loop judges samples itself.
    roles = tuple(role for role in roles_of(config, algorithm.requires()) if role.role is not Role.REWARD)
    if with_reference and all(role.role is not Role.REFERENCE for role in roles):
        roles = (*roles, reference_role(config))
    check_role_models(config, roles, tokenizer)
    prompts = None
    if config.data.train:
        tools = partial(tools_of, config.environment)
        prompts = PromptDataset(
            train_files(config.data.train), tokenizer, config.data, tools_of=tools, vocabulary=vocabulary, images=images
        )
        if prompts.environments:
            raise ConfigError(
                f"data.train: has the environments {sorted(prompts.environments)}, which a session does not run; leave "
                "these rows out"
            )
    return SessionInputs(
        config=config,
        spec=spec,
        tokenizer=tokenizer,
        answers=answers,
        vocabulary=vocabulary,
        algorithm=algorithm,
        roles=roles,
        prompts=prompts,
        images=images,
    )


def weighted_rows(rows: Sequence[Row], weights: Sequence[FloatArray], objective: CountedObjective) -> list[Row]:
    """Return rows with a factor of each token's loss; ConfigError if the objective would not read them."""
    if CORRECTION not in objective.reads:
        raise ConfigError(
            f"weights: got some for {type(objective).__name__}, which reads {sorted(objective.reads)}; leave them out, "
            f"or let its loss read the quantity {CORRECTION!r} and name it in `reads`"
        )
    pairs = zip(rows, weights, strict=True)
    return [row.with_quantities(**{CORRECTION: np.asarray(values, np.float32)}) for row, values in pairs]


def require_computable(
    objective: CountedObjective, rows: Sequence[Row], denominators: Denominators, state: AlgoState, *, is_critic: bool
) -> None:
    """Compute an objective on one row or pair with outputs of 0, so that its mistakes do not reach the ranks.

    Raises:
        DataError: it fails; the message has its error.
        ConfigError: a denominator of it is missing, or no positive number.
    """
    some = [rows[0], rows[len(rows) // 2]] if PAIRS in objective.denominators(rows) else rows[:1]
    batch = row_batch([row.only(objective.reads) for row in some], device=torch.device("cpu"))
    zeros = torch.zeros(batch.loss_mask.shape, requires_grad=True)
    try:
        sums = objective.loss(
            batch, ValueOutputs(values=zeros) if is_critic else PolicyOutputs(logprobs=zeros, entropy=zeros), state
        )
    except Exception as error:  # it may be a user's
        raise DataError(
            f"the objective {type(objective).__name__} fails on row {rows[0].label}: {type(error).__name__}: "
            f"{str(error).strip()}; correct it, or give rows what it reads (nothing was sent; accumulated gradients "
            "stay)"
        ) from error
    for name in (*sums.objective, *sums.metrics):
        value = denominators.get(name, math.nan)
        if not (math.isfinite(value) and value > 0):
            raise ConfigError(
                f"denominators: got {dict(denominators)}, expected a number > 0 for {name!r} of "
                f"{type(objective).__name__}; give the counts that session.denominators returns"
            )
