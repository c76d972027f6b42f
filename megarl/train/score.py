"""The scoring passes of a step: each model runs once over all that it is asked about, hinted rows included."""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from megarl.algos.cpo import EXCLUDED
from megarl.cluster import residency
from megarl.cluster.residency import Phase
from megarl.config.algo import CpoConfig
from megarl.data.answer_span import answer_mask
from megarl.data.chat import response_decoder
from megarl.data.hints import HintedRows, Hints, encode_hints, hinted_rows, shuffled_hints, user_tags
from megarl.record.metrics import Timers
from megarl.train.update import RoleScorer
from megarl.types import BoolArray, FloatArray, Prompt, Row, Score
from megarl.types.messages import Role

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

HINT_SCORES = frozenset({Score.HINT_LOGPROBS, Score.SHUFFLED_HINT_LOGPROBS, Score.HINT_KL})
_ACTOR_SCORES = HINT_SCORES | {Score.OLD_LOGPROBS, Score.OLD_ENTROPY}
# Phases by the role that scores in them, as verl names their times.
_TIMERS = {Role.REFERENCE: "ref", Role.CRITIC: "values", Role.ACTOR: "old_log_prob"}


def with_scores(rows: Sequence[Row], scores: Mapping[Any, Sequence[FloatArray]]) -> list[Row]:
    """Rows with further scores by name, each given in row order."""
    return [row.with_scores(**{str(name): values[i] for name, values in scores.items()}) for i, row in enumerate(rows)]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoringPasses:
    """Adds to rows what an algorithm needs to know of them. `enter` is called with the phase of each pass before it."""

    scorers: Mapping[Role, RoleScorer]
    hints: "HintWriter | None"
    enter: Callable[[Phase], None]
    timers: Timers

    def score(
        self, rows: list[Row], prompts: Mapping[str, Prompt], needed: frozenset[Score], *, seed: int, step: int
    ) -> tuple[list[Row], dict[str, float]]:
        """The rows with the scores `needed`, and metrics of the hints; `seed` decides which hints are shuffled."""
        if Score.REF_LOGPROBS in needed:
            with self._pass(Role.REFERENCE) as reference:
                rows = with_scores(rows, {Score.REF_LOGPROBS: reference.score(rows, step=step)["logprobs"]})
        if Score.VALUES in needed:
            with self._pass(Role.CRITIC) as critic:
                rows = with_scores(rows, {Score.VALUES: critic.score(rows, step=step)["values"]})
        if not needed & _ACTOR_SCORES:
            return rows, {}
        with self._pass(Role.ACTOR) as actor:
            if not needed & HINT_SCORES:
                return self._score_plain(actor, rows, step), {}
            return self._score_hinted(actor, rows, prompts, needed, seed=seed, step=step)

    def _score_plain(self, actor: RoleScorer, rows: list[Row], step: int) -> list[Row]:
        found = actor.score(rows, step=step)
        return with_scores(rows, {Score.OLD_LOGPROBS: found["logprobs"], Score.OLD_ENTROPY: found["entropy"]})

    def _score_hinted(
        self,
        actor: RoleScorer,
        rows: list[Row],
        prompts: Mapping[str, Prompt],
        needed: frozenset[Score],
        *,
        seed: int,
        step: int,
    ) -> tuple[list[Row], dict[str, float]]:
        """Plain and hinted rows in one packed pass."""
        assert self.hints is not None, "an algorithm with hints needs a HintWriter"
        hints = self.hints.encode(prompts)
        variants = {Score.HINT_LOGPROBS: self.hints.write(rows, hints)}
        if Score.SHUFFLED_HINT_LOGPROBS in needed:
            variants[Score.SHUFFLED_HINT_LOGPROBS] = self.hints.write(rows, shuffled_hints(hints, seed=seed))
        # A row counts as hinted only if all its variants got a hint: a baseline of nothing would be none.
        has_hint = np.logical_and.reduce([variant.has_hint for variant in variants.values()])
        asked = [*rows, *(row for variant in variants.values() for row in variant.rows)]
        pairs = np.flatnonzero(variants[Score.HINT_LOGPROBS].has_hint) if Score.HINT_KL in needed else np.empty(0, int)
        found, count = _score_with_pairs(actor, asked, pairs.tolist(), len(rows), step), len(rows)
        old = found["logprobs"][:count]
        scores = {Score.OLD_LOGPROBS: old, Score.OLD_ENTROPY: found["entropy"][:count]}
        for place, name in enumerate(variants, start=1):
            scores[name] = _where(has_hint, found["logprobs"][place * count : (place + 1) * count], old)
        if Score.HINT_KL in needed:
            scores[Score.HINT_KL] = found["kl"]
        rows = with_scores(rows, scores)
        return self.hints.exclude_answers(rows), variants[Score.HINT_LOGPROBS].metrics()

    @contextlib.contextmanager
    def _pass(self, role: Role) -> Iterator[RoleScorer]:
        self.enter(residency.scoring(role))
        with self.timers(_TIMERS[role]):
            yield self.scorers[role]


def _where(has_hint: BoolArray, values: Sequence[FloatArray], without: Sequence[FloatArray]) -> list[FloatArray]:
    """`values`, in rows that got no hint `without`, exactly."""
    return [a if has else b for has, a, b in zip(has_hint, values, without, strict=True)]


def _score_with_pairs(
    actor: RoleScorer, asked: Sequence[Row], pairs: Sequence[int], count: int, step: int
) -> dict[str, list[FloatArray]]:
    """Log-probs and entropies of all rows asked about; `kl` of the first `count`: KL(with the hint ‖ without it).

    Row i and its hinted form, row count + i, share a pass where i is in `pairs`; without a hint the KL is 0. So no
    pair is longer than a micro-batch: a row that leaves no room for itself twice gets no hint.
    """
    twins = [count + i for i in pairs]
    together = {*pairs, *twins}
    alone = [i for i in range(len(asked)) if i not in together]
    places = [*alone, *pairs, *twins]
    single = actor.score([asked[i] for i in alone], step=step) if alone else {"logprobs": [], "entropy": []}
    kl = [np.zeros(row.num_response_tokens, np.float32) for row in asked[:count]]
    paired: dict[str, list[FloatArray]] = {"logprobs": [], "entropy": []}
    if pairs:
        paired = actor.score_pairs([asked[i] for i in pairs], [asked[i] for i in twins], step=step)
        for i, values in zip(pairs, paired["kl"], strict=True):
            kl[i] = values
    order = np.argsort(places)
    joined = {name: [*single[name], *paired[name]] for name in ("logprobs", "entropy")}
    return {**{name: [values[i] for i in order] for name, values in joined.items()}, "kl": kl}


class HintWriter:
    """Hints of prompts as tokens, and rows with them."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", cfg: CpoConfig, *, max_row_tokens: int) -> None:
        """ConfigError if the chat template has no user tag that a hint could follow."""
        self._tokenizer, self._cfg, self._max_row_tokens = tokenizer, cfg, max_row_tokens
        self._tags, self._decode = user_tags(tokenizer), response_decoder(tokenizer)

    def encode(self, prompts: Mapping[str, Prompt]) -> Hints:
        """Token ids of the prompts' hints."""
        return encode_hints(self._tokenizer, prompts.values(), self._cfg.hint)

    def write(self, rows: Sequence[Row], hints: Hints) -> HintedRows:
        """The rows with their prompts' hints, as far as these fit."""
        return hinted_rows(rows, hints, self._tags, self._cfg.hint, max_row_tokens=self._max_row_tokens)

    def exclude_answers(self, rows: list[Row]) -> list[Row]:
        """With `exclude_answer`, rows whose final answers are marked."""
        if not self._cfg.exclude_answer:
            return rows
        responses = (row.token_ids[row.num_prompt_tokens :].tolist() for row in rows)
        return with_scores(rows, {EXCLUDED: [answer_mask(ids, self._decode).astype(np.float32) for ids in responses]})
