"""Ask the policy itself for verdicts, on the engines of the run."""

import itertools
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING

from megarl.cluster import offloading
from megarl.config.generation import Sampling
from megarl.config.judges import SamplingConfig
from megarl.data.answers import response_decoder
from megarl.data.chat import encode_chats
from megarl.rewards.llm import JudgeCompletion, Request
from megarl.rollout.source import Group, RolloutSource, SamplingPlan, Wait, begin, collect
from megarl.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class PolicyCompletions:
    """The policy with its current weights, as a model that continues chats.

    Requests wait for `flush`, so that they do not take the engines from samples of the batch that they are about.

    max_tokens: context of the engines. stop_token_ids: what ends an answer. enter: called with the phase before
    generation, so that the engines are on their devices.
    """

    is_deferred = True

    def __init__(
        self,
        source: RolloutSource,
        wait: Wait,
        tokenizer: "PreTrainedTokenizerBase",
        sampling: SamplingConfig,
        *,
        max_tokens: int,
        stop_token_ids: tuple[int, ...] = (),
        run_seed: int,
        timeout_s: float,
        enter: Callable[[offloading.Phase], None] = lambda phase: None,
    ) -> None:
        self._source, self._wait, self._tokenizer, self._sampling = source, wait, tokenizer, sampling
        self._decode = response_decoder(tokenizer, keeps_channels=False)
        self._max_tokens, self._run_seed, self._timeout_s, self._enter = max_tokens, run_seed, timeout_s, enter
        self._stop_token_ids, self._numbers = stop_token_ids, itertools.count()
        self._waiting: list[tuple[Request, Future[JudgeCompletion]]] = []

    def submit(self, request: Request) -> Future[JudgeCompletion]:
        pending: Future[JudgeCompletion] = Future()
        self._waiting.append((request, pending))
        return pending

    def flush(self) -> None:
        waiting, self._waiting = self._waiting, []
        chats = encode_chats(self._tokenizer, [request.messages for request, _ in waiting]) if waiting else []
        sampling, asked = self._sampling, dict[str, Future[JudgeCompletion]]()
        prompts = []
        for (_, pending), ids in zip(waiting, chats, strict=True):
            if len(ids) + sampling.max_tokens > self._max_tokens:
                reason = (
                    f"the question has {len(ids)} tokens and sampling.max_tokens={sampling.max_tokens}, more than the "
                    f"engine's {self._max_tokens}"
                )
                pending.set_result(JudgeCompletion(text=None, reason=reason))
                continue
            # The number makes the seed: two votes on the same question differ.
            uid = f"judge:{next(self._numbers)}"
            prompts.append(Prompt(uid=uid, token_ids=tuple(ids), data_source="", ground_truth=""))
            asked[uid] = pending
        if not prompts:
            return
        plan = SamplingPlan(
            step=0,
            num_samples=1,
            sampling=Sampling(
                temperature=sampling.temperature, top_p=sampling.top_p, stop_token_ids=self._stop_token_ids
            ),
            max_response_tokens=sampling.max_tokens,
            run_seed=self._run_seed,
        )
        self._enter(offloading.GENERATE)
        groups = [Group(prompt=prompt, plan=plan) for prompt in prompts]
        begin(self._source, groups)
        for sample in collect(self._wait, groups, timeout_s=self._timeout_s).samples:
            tokens = len(sample.prompt_token_ids) + sample.num_response_tokens
            text = self._decode(sample.response_token_ids.tolist())
            asked[sample.uid].set_result(JudgeCompletion(text=text, finish_reason=sample.finish_reason, tokens=tokens))

    def close(self) -> None:
        """Do nothing: the engines belong to the run."""
