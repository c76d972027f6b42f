"""Write hints into the prompts of a step's rows, for CPO and for teachers that read hints."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from megarl.algos.cpo import EXCLUDED
from megarl.config.algo import AlgoConfig, HintConfig
from megarl.config.environments import EnvironmentConfig
from megarl.data.answer_span import answer_mask
from megarl.data.answers import response_decoder
from megarl.data.hints import HintPlacer, donors, hinted_rows
from megarl.data.prompts import ToolsOf, no_tools
from megarl.data.vocabulary import EVERY_TOKEN, Vocabulary
from megarl.environments import tools_of
from megarl.errors import DataError
from megarl.types import BoolArray, Prompt, Row

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True, kw_only=True)
class TaughtRows:
    """Rows that say which prompts their teacher reads, and metrics of the hints in them.

    baseline: the same responses after prompts with the hints of others; empty if these were not asked for.
    """

    rows: list[Row]
    baseline: list[Row]
    metrics: Mapping[str, float]


class HintWriter:
    """A writer of hints into prompts (`placer`), which also marks the tokens that hints must leave alone."""

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerBase",
        cfg: HintConfig,
        *,
        exclude_answer: bool = False,
        max_prompt_tokens: int,
        tools_of: ToolsOf = no_tools,
        vocabulary: Vocabulary = EVERY_TOKEN,
    ) -> None:
        """Make a writer. exclude_answer: tokens of the final answer are left alone. See `HintPlacer` for the others."""
        self.placer = HintPlacer(
            tokenizer, cfg, max_prompt_tokens=max_prompt_tokens, tools_of=tools_of, vocabulary=vocabulary
        )
        self._exclude_answer, self._decode = exclude_answer, response_decoder(tokenizer)

    def for_teacher(
        self, rows: Sequence[Row], prompts: Mapping[str, Prompt], *, seed: int, shuffled: bool
    ) -> TaughtRows:
        """Give rows the prompts that their teacher reads. seed: draws which prompts exchange hints for the baseline.

        Nothing is taught on rows without a hint.
        """
        require_plain_prompts(rows, prompts)
        own = self.placer.place_all(prompts)
        hinted = hinted_rows(rows, own)
        has_hint, baseline = hinted.has_hint, list[Row]()
        if shuffled:
            others = hinted_rows(rows, self.placer.place_all(prompts, donors(own, seed=seed)))
            has_hint, baseline = has_hint & others.has_hint, list(others.rows)
        taught = [
            row.with_hinted_prompt(prompt.token_ids) if has else row
            for row, prompt, has in zip(rows, hinted.prompts, has_hint, strict=True)
        ]
        return TaughtRows(rows=self.excluded(taught, has_hint), baseline=baseline, metrics=hinted.metrics())

    def excluded(self, rows: list[Row], has_hint: BoolArray) -> list[Row]:
        """Return the rows with a mark on every token that hints must leave alone; without marks if there are none.

        These are rows without a hint and, with `exclude_answer`, final answers. Answers of a conversation are looked
        for in its last turn.
        """
        if not self._exclude_answer and has_hint.all():
            return rows
        marked = []
        for row, has in zip(rows, has_hint, strict=True):
            mark = np.full(row.num_response_tokens, not has)
            if self._exclude_answer and has:
                # Masked tokens stand between turns.
                start = int(np.flatnonzero(~row.loss_mask).max(initial=-1)) + 1
                last = row.token_ids[row.num_prompt_tokens + start :].tolist()
                mark[start:] = answer_mask(last, self._decode)
            marked.append(row.with_quantities(**{EXCLUDED: mark.astype(np.float32)}))
        return marked


def require_plain_prompts(rows: Sequence[Row], prompts: Mapping[str, Prompt]) -> None:
    """Raise DataError for a row whose environment opened the conversation: nobody would know where the hint goes."""
    for row in rows:
        prompt = prompts[row.uid]
        if prompt.environment and row.token_ids[: row.num_prompt_tokens].tolist() != list(prompt.token_ids):
            raise DataError(
                f"row {row.label}: its environment {prompt.environment!r} opens conversations with messages of its "
                "own, and hints are written into those of the data alone; move the messages to the data's prompts, "
                "or set algo.cpo.method=none and algo.distill.teacher=none"
            )


def open_hints(
    algo: AlgoConfig,
    environment: EnvironmentConfig,
    tokenizer: "PreTrainedTokenizerBase",
    max_prompt_tokens: int,
    vocabulary: Vocabulary = EVERY_TOKEN,
) -> HintWriter:
    """Open the writer of hints. max_prompt_tokens: beside them, the longest response fits a row."""
    return HintWriter(
        tokenizer,
        algo.cpo.hint,
        exclude_answer=algo.cpo.exclude_answer or algo.distill.exclude_answer,
        max_prompt_tokens=max_prompt_tokens,
        tools_of=partial(tools_of, environment),
        vocabulary=vocabulary,
    )
