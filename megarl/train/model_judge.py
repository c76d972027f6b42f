"""Reward samples with the scores of a Megatron reward model."""

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from megarl.cluster.offloading import Phase
from megarl.data.answers import Answers, response_decoder
from megarl.data.chat import encode_chats
from megarl.data.harmony import is_harmony
from megarl.errors import DataError
from megarl.rewards.judge import Gathered, Judged
from megarl.train.passes import RolePasses
from megarl.types import IdArray, Message, Prompt, Reward, RolloutBatch, Sample, row_read_at_end
from megarl.types.messages import RoleSpec
from megarl.weights.families import read_model_spec

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class ConversationEncoder:
    """An encoder of samples as a reward model reads them: prompt, response, and what its template writes after an
    answer.

    A reward model with the policy's tokenizer and template reads exactly the sampled tokens, those of environments
    between them, and nothing after a response that was cut. For any other reward model, the last turn is decoded, and
    rendered as the answer to the prompt by its own template.
    """

    def __init__(
        self, policy: "PreTrainedTokenizerBase", own: "PreTrainedTokenizerBase", answers: Answers | None = None
    ) -> None:
        """Compare the tokenizers of policy and reward model. answers: those of the policy; None: as `policy` says."""
        self._own, self._decode = own, response_decoder(policy, keeps_channels=is_harmony(own))
        alike = own.get_vocab() == policy.get_vocab() and own.chat_template == policy.chat_template
        answers = answers or Answers(policy)
        ending = answers.ending if alike and own.eos_token_id == policy.eos_token_id else None
        self._are_at_end_of = answers.stop_tokens.are_at_end_of
        self._ending = None if ending is None else np.asarray(ending, dtype=np.int32)

    @property
    def num_extra_tokens(self) -> int | None:
        """Return an upper bound on the tokens that the reward model's input has beyond prompt and response.

        None if there is no bound, because the reward model has another tokenizer or chat template than the policy.
        """
        return None if self._ending is None else len(self._ending)

    def check(self, prompts: Iterable[Prompt]) -> None:
        """Raise TemplateRefusal, which names the prompt, if the reward model's template refuses one of these."""
        for prompt in prompts if self._ending is None else ():
            self._rendered(prompt, "!", f"prompt {prompt.uid} for reward_model.model_path")

    def encode(self, prompt: Prompt, sample: Sample) -> IdArray:
        """Return the token ids of the conversation made of a prompt and one of its samples."""
        if self._ending is None:
            answer = self._decode(sample.last_turn_ids.tolist())
            return self._rendered(prompt, answer, f"sample {sample.uid}/{sample.sample_index} for the reward model")
        read = sample.context_ids
        ending = self._ending if self._are_at_end_of(read.tolist()) else self._ending[:0]
        return np.concatenate([read, ending])

    def _rendered(self, prompt: Prompt, answer: str, where: str) -> IdArray:
        chat = [*prompt.messages, Message(role="assistant", content=answer)]
        (ids,) = encode_chats(self._own, [chat], add_generation_prompt=False, places=[where])
        return np.asarray(ids, dtype=np.int32)


class ModelRewards:
    """Computes rewards of samples by the reward model that the trainer's ranks host.

    enter: called with the phase of the pass before it, so that the model is on its devices.
    """

    def __init__(
        self,
        passes: RolePasses,
        encoder: ConversationEncoder,
        *,
        max_tokens: int,
        enter: Callable[[Phase], None] = lambda phase: None,
    ) -> None:
        self._passes, self._encoder, self._max_tokens, self._enter = passes, encoder, max_tokens, enter

    def score(self, batch: RolloutBatch, *, step: int = 0) -> list[float]:
        """Return the reward model's score of each sample, in the order of `batch.samples`; `step` is for error
        messages.

        Raises:
            DataError: a conversation is longer than the model takes.
            NonFiniteError: a score is NaN or infinite.
        """
        rows = []
        for sample in batch.samples:
            ids = self._encoder.encode(batch.prompts[sample.uid], sample)
            if len(ids) > self._max_tokens:
                raise DataError(
                    f"sample {sample.uid}/{sample.sample_index}: has {len(ids)} tokens for the reward model, expected "
                    f"<= {self._max_tokens}; raise reward_model.micro_batch_tokens, or lower "
                    f"rollout.max_response_tokens"
                )
            rows.append(row_read_at_end(sample.uid, sample.sample_index, ids))
        self._enter(self._passes.phase)
        return np.concatenate(self._passes.forward(rows, step=step)["values"]).tolist() if rows else []


class ModelJudge:
    """The judge that asks the reward model. It waits until all samples are there, because engines use the same devices.

    If no rule decides correctness, a score above 0 is correct.
    """

    def __init__(self, model: ModelRewards) -> None:
        self._model = model

    def begin(self) -> Gathered:
        return Gathered()

    def finish(self, sessions: Sequence[Gathered]) -> Judged:
        items = [item for session in sessions for item in session.items]
        batch = RolloutBatch(
            prompts={item.prompt.uid: item.prompt for item in items}, samples=tuple(item.sample for item in items)
        )
        return Judged(rewards=[Reward(score=score, correct=score > 0) for score in self._model.score(batch)])

    def close(self) -> None:
        """Do nothing: the ranks that hold the model belong to the run."""


def max_reward_tokens(judge: RoleSpec) -> int:
    """Return the length in tokens of the longest conversation that a reward model accepts.

    It is the size of a micro-batch minus one token for the score, but at most the model's context.
    """
    positions = read_model_spec(judge.model.path, "reward_model.model_path").max_positions
    return min(judge.settings.micro_batch_tokens - 1, positions)
