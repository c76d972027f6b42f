"""Answers of a small model, sampled and scored with and without hints, on the CPU and without a cluster."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import transformers

from megarl.algos.cpo import CpoInputs
from megarl.config.algo import HintConfig
from megarl.data.answer_span import answer_mask
from megarl.data.chat import encode_chats
from megarl.data.hints import HintedPrompt, HintPlacer, donors, hinted_rows
from megarl.rewards import score
from megarl.run.evaluation.hint_signal import hint_inputs
from megarl.types import BoolArray, Message, Prompt, Row
from megarl_lab.recipes.tasks import BuiltinTask, Problem
from megarl_lab.recipes.tasks.mistakes import ReadAnswer, read_answer

# A hint in every place, in the words that the tiny model's demonstrations have before the question.
HINTS: Mapping[str, HintConfig] = {
    "before_question": HintConfig(place="before_question", template="Hint: {hint}\n", on_missing="error"),
    "after_question": HintConfig(place="after_question", template="\nHint: {hint}", on_missing="error"),
    "system": HintConfig(place="system", template="Hint: {hint}", on_missing="error"),
    "user_turn": HintConfig(place="user_turn", template="{question}\nHint: {hint}\n{question}", on_missing="error"),
}
MAX_PROMPT_TOKENS = 256
BATCH_ROWS = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledAnswer:
    """This is a sampled answer to a problem, the place of which among all problems is `group`.

    Attributes:
        token_ids: with the end token.
        read: the answer up to its first mistake.
        answer_span: [R] bool, the tokens of the final answer.
    """

    group: int
    token_ids: tuple[int, ...]
    correct: bool
    read: ReadAnswer
    answer_span: BoolArray


class LocalModel:
    """A Hugging Face directory on the CPU, for models small enough to sample and score without an engine."""

    def __init__(self, path: Path) -> None:
        self._tokenizer = transformers.AutoTokenizer.from_pretrained(path, trust_remote_code=False)
        self._model = transformers.AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.float32, trust_remote_code=False, use_safetensors=True
        ).eval()

    def pose(self, problems: Sequence[Problem]) -> list[Prompt]:
        """Write problems as prompts, whose uids are their places, with the solution to be given as a hint."""
        chats = [[Message(role="user", content=problem.question)] for problem in problems]
        return [
            Prompt(
                uid=str(i),
                token_ids=tuple(ids),
                data_source="",
                ground_truth=problem.ground_truth,
                extra_info={"solution": problem.solution},
                messages=tuple(chat),
            )
            for i, (problem, chat, ids) in enumerate(
                zip(problems, chats, encode_chats(self._tokenizer, chats), strict=True)
            )
        ]

    def hint(self, prompts: Sequence[Prompt], cfg: HintConfig) -> dict[str, HintedPrompt]:
        """Give every prompt its own hint."""
        placer = HintPlacer(self._tokenizer, cfg, max_prompt_tokens=MAX_PROMPT_TOKENS)
        return placer.place_all({prompt.uid: prompt for prompt in prompts})

    @torch.inference_mode()
    def sample(
        self,
        task: BuiltinTask,
        problems: Sequence[Problem],
        prompts: Sequence[Sequence[int]],
        *,
        num_samples: int,
        max_tokens: int,
        seed: int,
    ) -> list[SampledAnswer]:
        """Sample answers to the problems' prompts at temperature 1. Those that hit the limit are left out."""
        eos, pad = self._tokenizer.eos_token_id, self._tokenizer.pad_token_id
        rows = [(group, list(prompt)) for group, prompt in enumerate(prompts) for _ in range(num_samples)]
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
                        answers.append(self.judge(task, problems[group], group, row[: row.index(eos) + 1]))
        return answers

    def judge(self, task: BuiltinTask, problem: Problem, group: int, token_ids: Sequence[int]) -> SampledAnswer:
        """Judge a complete answer, whose last token is the end token."""
        content = token_ids[:-1]
        text = self._tokenizer.decode(content)
        return SampledAnswer(
            group=group,
            token_ids=tuple(token_ids),
            correct=score(task.data_source, text, problem.ground_truth, {}).correct,
            read=read_answer(task, problem, text),
            answer_span=np.append(answer_mask(content, self._tokenizer.decode), False),
        )

    def hint_inputs(
        self, answers: Sequence[SampledAnswer], prompts: Sequence[Prompt], cfg: HintConfig, *, seed: int
    ) -> CpoInputs:
        """Score answers without a hint, with their prompts' own hints, and with those of other prompts."""
        placer = HintPlacer(self._tokenizer, cfg, max_prompt_tokens=MAX_PROMPT_TOKENS)
        posed = {prompt.uid: prompt for prompt in prompts}
        own = placer.place_all(posed)
        others = placer.place_all(posed, donors(own, seed=seed))
        rows = [
            Row(
                uid=str(answer.group),
                sample_index=i,
                token_ids=np.array([*prompts[answer.group].token_ids, *answer.token_ids]),
                num_prompt_tokens=len(prompts[answer.group].token_ids),
                loss_mask=np.ones(len(answer.token_ids), dtype=np.bool_),
            )
            for i, answer in enumerate(answers)
        ]
        return hint_inputs(
            self._model,
            rows,
            hinted_rows(rows, own),
            hinted_rows(rows, others),
            correct=[answer.correct for answer in answers],
        )
