"""Answers of a small model, sampled without a hint and scored with it, on the CPU and without a cluster."""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from megarl.data.answer_span import answer_mask
from megarl.data.chat import encode_chats
from megarl.data.tasks import BuiltinTask, Problem
from megarl.data.tasks.mistakes import ReadAnswer, read_answer
from megarl.rewards import score
from megarl.types import BoolArray, Message

# What the user says where it is not the question alone; a system turn has the hint alone.
_USER_TURNS: Mapping[str, str] = {
    "before_question": "Hint: {hint}\n{question}",
    "after_question": "{question}\nHint: {hint}",
    "system": "{question}",
    "user_turn": "{question}\nHint: {hint}\n{question}",
}
PLACES = tuple(_USER_TURNS)
BATCH_ROWS = 128


def plain_chat(question: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}]


def hinted_chat(question: str, hint: str, place: str) -> list[dict[str, str]]:
    """Write the chat of a question with a hint in one of `PLACES`."""
    user = {"role": "user", "content": _USER_TURNS[place].replace("{question}", question).replace("{hint}", hint)}
    return [{"role": "system", "content": f"Hint: {hint}"}, user] if place == "system" else [user]


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """This is a sampled answer to a problem, the place of which among all problems is `group`.

    Attributes:
        token_ids: with the end token, if it was written.
        read: the answer up to its first mistake.
        mistake: tokens from the first wrong one to the end of its line; None without a mistake.
        answer_span: [R] bool, the tokens of the final answer.
    """

    group: int
    problem: Problem
    token_ids: tuple[int, ...]
    correct: bool
    read: ReadAnswer
    mistake: slice | None
    answer_span: BoolArray


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """These are [R] per token of one answer: its log-prob, and KL(scored ‖ policy without hint) over the vocabulary."""

    logprobs: Tensor
    kl: Tensor


class LocalModel:
    """A Hugging Face directory on the CPU, for models small enough to sample and score without an engine."""

    def __init__(self, path: Path) -> None:
        self._tokenizer = AutoTokenizer.from_pretrained(path)
        self._model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()

    def encode(self, chats: Sequence[Sequence[Mapping[str, str]]]) -> list[list[int]]:
        return encode_chats(self._tokenizer, [[Message(**message) for message in chat] for chat in chats])

    @torch.inference_mode()
    def sample(
        self,
        task: BuiltinTask,
        problems: Sequence[Problem],
        chats: Sequence[Sequence[Mapping[str, str]]],
        *,
        num_samples: int,
        max_tokens: int,
        seed: int,
    ) -> list[Answer]:
        """Sample answers to the chats, one per problem, at temperature 1. Those that hit the limit are left out."""
        eos, pad = self._tokenizer.eos_token_id, self._tokenizer.pad_token_id
        prompts = self.encode(chats)
        rows = [(group, prompt) for group, prompt in enumerate(prompts) for _ in range(num_samples)]
        answers = []
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            for start in range(0, len(rows), BATCH_ROWS):
                chunk = rows[start : start + BATCH_ROWS]
                width = max(len(prompt) for _, prompt in chunk)
                ids = torch.tensor([[pad] * (width - len(prompt)) + prompt for _, prompt in chunk])
                mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for _, prompt in chunk])
                written = self._model.generate(
                    ids, attention_mask=mask, do_sample=True, top_k=0, top_p=1.0, max_new_tokens=max_tokens
                )[:, width:].tolist()
                for (group, _), row in zip(chunk, written, strict=True):
                    if eos in row:
                        token_ids = row[: row.index(eos) + 1]
                        answers.append(self.judge(task, problems[group], group, token_ids))
        return answers

    def judge(self, task: BuiltinTask, problem: Problem, group: int, token_ids: Sequence[int]) -> Answer:
        """Judge a complete answer, whose last token is the end token, and find its first wrong tokens."""
        content = token_ids[:-1]
        text = self._tokenizer.decode(content)
        read = read_answer(task, problem, text)
        mistake = None
        if read.mistake is not None:
            # Every token spells one or more characters of the text; the end token stands behind the last.
            ends = list(accumulate(len(self._tokenizer.decode([i])) for i in content))
            first = bisect_right(ends, read.mistake.start)
            mistake = slice(first, max(bisect_right(ends, read.mistake.stop - 1) + 1, first + 1))
        return Answer(
            group=group,
            problem=problem,
            token_ids=tuple(token_ids),
            correct=score(task.data_source, text, problem.ground_truth, {}).correct,
            read=read,
            mistake=mistake,
            answer_span=np.append(answer_mask(content, self._tokenizer.decode), False),
        )

    def score(
        self, answers: Sequence[Answer], chats: Sequence[Sequence[Mapping[str, str]]], base: Sequence[Tensor] = ()
    ) -> tuple[list[Scores], list[Tensor]]:
        """Score answers after the chats; also return each one's log-probs over the vocabulary, [R, V].

        base: those without a hint, from an earlier call, for the divergence; without it that is 0.
        """
        scores, everything = [], []
        for i, logprobs in enumerate(self._logprobs(self.encode(chats), [list(a.token_ids) for a in answers])):
            chosen = logprobs.gather(-1, torch.tensor(answers[i].token_ids)[:, None])[:, 0]
            kl = (logprobs.exp() * (logprobs - base[i])).sum(-1) if base else torch.zeros_like(chosen)
            scores.append(Scores(logprobs=chosen, kl=kl))
            everything.append(logprobs)
        return scores, everything

    @torch.inference_mode()
    def _logprobs(self, prompts: Sequence[Sequence[int]], responses: Sequence[Sequence[int]]) -> list[Tensor]:
        """Compute log-probs over the vocabulary at every token of the responses, [R, V] each."""
        rows = [[*prompt, *response] for prompt, response in zip(prompts, responses, strict=True)]
        found = []
        for start in range(0, len(rows), BATCH_ROWS):
            chunk = rows[start : start + BATCH_ROWS]
            width = max(map(len, chunk))
            # What stands behind a row does not change its scores: attention is causal.
            logits = self._model(torch.tensor([row + [0] * (width - len(row)) for row in chunk])).logits
            for i, row_logits in enumerate(logits, start=start):
                first = len(prompts[i]) - 1
                found.append(F.log_softmax(row_logits[first : first + len(responses[i])].float(), dim=-1))
        return found
