"""Hints: what is written after the last user tag of a prompt for one more scoring pass, and nowhere else.

A hinted row is made from a row that was already sampled. It has the same response and is only scored, so that a hint
reaches neither the rollout engine, nor evaluation, nor the texts that are logged.
"""

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import TypeAlias

import numpy as np
from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from megarl.config.algo import HintConfig
from megarl.errors import ConfigError, DataError
from megarl.types import BoolArray, IntArray, Prompt, Row

# Token ids of hints by the uid of their prompt; a prompt without a hint has none of them.
Hints: TypeAlias = Mapping[str, IntArray]

# Keys of extra_info by algo.cpo.hint.source, the first one present counts; an answer may also be the ground truth.
_KEYS: Mapping[str, tuple[str, ...]] = {"solution": ("gold_solution", "solution"), "answer": ("ground_truth",)}

# Contents of turns that no template writes.
_FIRST, _REPLY, _SECOND = "Q0Z0Q", "A1Z1A", "Q2Z2Q"


class UserTagNotFound(DataError):  # noqa: N818 - the name under which the rule is known
    """A prompt has no user tag after which a hint could stand."""


# --- texts


def hint_text(prompt: Prompt, cfg: HintConfig) -> str | None:
    """The prompt's hint in its template; None without one. DataError naming the prompt if `on_missing` is error."""
    candidates = {f"extra_info.{key}": prompt.extra_info.get(key) for key in _KEYS[cfg.source]}
    if cfg.source == "answer":
        candidates["reward_model.ground_truth"] = prompt.ground_truth
    for key, text in candidates.items():
        if text is not None and not isinstance(text, str):
            raise DataError(f"prompt {prompt.uid}: {key} is {type(text).__name__}, expected a string for its hint")
        if text and text.strip():
            return cfg.template.replace("{hint}", text)
    if cfg.on_missing == "error":
        raise DataError(
            f"prompt {prompt.uid}: has no hint, expected text in {' or '.join(candidates)}; add it, or set "
            f"algo.cpo.hint.on_missing=skip_row"
        )
    return None


def require_hints(prompts: Iterable[Prompt], cfg: HintConfig) -> None:
    """DataError if no prompt has a hint, or with `on_missing=error` if one has none; for the start of a run."""
    has_some = False
    for prompt in prompts:
        has_some = hint_text(prompt, cfg) is not None or has_some
        if has_some and cfg.on_missing == "skip_row":
            return
    if not has_some:
        raise DataError(
            f"data.train: no prompt has a hint, expected text in {' or '.join(_KEYS[cfg.source])} of extra_info "
            f"(algo.cpo.hint.source={cfg.source}); add it, or set algo.cpo.method=none"
        )


def encode_hints(tokenizer: PreTrainedTokenizerBase, prompts: Iterable[Prompt], cfg: HintConfig) -> Hints:
    """Token ids of the prompts' hints, uncut."""
    texts = {prompt.uid: hint_text(prompt, cfg) for prompt in prompts}
    return {
        uid: np.asarray(tokenizer(text, add_special_tokens=False)["input_ids"] if text else [], dtype=np.int64)
        for uid, text in texts.items()
    }


def shuffled_hints(hints: Hints, *, seed: int) -> Hints:
    """To each prompt that has a hint that of another one: a cycle in an order that `seed` decides.

    It does not depend on the order of `hints`. A single hint has no other: its prompt gets an empty one.
    """
    uids = sorted(uid for uid, ids in hints.items() if len(ids))
    random.Random(seed).shuffle(uids)
    donors = dict(zip(uids, [*uids[1:], *uids[:1]], strict=True)) if len(uids) > 1 else {}
    return {uid: hints[donors[uid]] if uid in donors else np.empty(0, np.int64) for uid in hints}


# --- where a hint stands


@dataclass(frozen=True, slots=True, kw_only=True)
class UserTags:
    """Token ids that stand before what the user says: after another turn, and at the start of a chat."""

    after_turn: tuple[int, ...]
    at_start: tuple[int, ...]


def user_tags(tokenizer: PreTrainedTokenizerBase) -> UserTags:
    """The user tags of the tokenizer's chat template, found by rendering a chat with known contents.

    ConfigError if the template cannot render one, or if the tag's tokens cannot be told from their surroundings.
    """
    text = _render_probe(tokenizer)
    tag_text = text.partition(_REPLY)[2].partition(_SECOND)[0]
    after_turn = _encode(tokenizer, tag_text)
    at_start = _common_suffix(_encode(tokenizer, text.partition(_FIRST)[0]), after_turn)
    ids = _encode(tokenizer, text)
    place = _last_place(ids, at_start)
    found = (
        place == _last_place(ids, after_turn)
        and _decode(tokenizer, after_turn) == tag_text
        and _decode(tokenizer, ids[place:]).startswith(_SECOND)
    )
    if not at_start or not found:
        raise ConfigError(
            f"model.path: the chat template puts {tag_text!r} before what the user says, which are not tokens of "
            f"their own there; expected a tag such as '<|im_start|>user'; set algo.cpo.method=none, or use a model "
            f"with such a template"
        )
    return UserTags(after_turn=tuple(after_turn), at_start=tuple(at_start))


def insertion_place(prompt_ids: Sequence[int] | IntArray, tags: UserTags) -> int:
    """Where the last user turn of a prompt begins: right after the last tag, in tokens from the prompt's start.

    The tag that follows a turn is looked for first, then the one at a chat's start. Raises UserTagNotFound.
    """
    for tag in (tags.after_turn, tags.at_start):
        place = _last_place(prompt_ids, tag)
        if place is not None:
            return place
    raise UserTagNotFound(
        f"the prompt of {len(prompt_ids)} tokens has no user tag, expected {list(tags.at_start)} in it; "
        f"give it a user turn, or set algo.cpo.method=none"
    )


def _render_probe(tokenizer: PreTrainedTokenizerBase) -> str:
    roles = ("user", "assistant", "user")
    chat = [{"role": r, "content": c} for r, c in zip(roles, (_FIRST, _REPLY, _SECOND), strict=True)]
    try:
        text: str = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    except TemplateError as error:
        raise ConfigError(f"model.path: the chat template does not render user, assistant, user: {error}") from error
    if not text.find(_FIRST) < text.find(_REPLY) < text.find(_SECOND) or _FIRST not in text:
        raise ConfigError(f"model.path: the chat template does not keep the contents of a chat: it wrote {text!r}")
    return text


def _encode(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


def _decode(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> str:
    text: str = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return text


def _common_suffix(left: list[int], right: list[int]) -> list[int]:
    pairs = zip(reversed(left), reversed(right), strict=False)
    num_equal = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    return right[len(right) - num_equal :]


def _last_place(ids: Sequence[int] | IntArray, tag: Sequence[int]) -> int | None:
    """The end of the last occurrence of `tag` in `ids`."""
    values, n = [int(i) for i in ids], len(tag)
    ends = (end for end in range(len(values), n - 1, -1) if tuple(values[end - n : end]) == tuple(tag))
    return next(ends, None)


# --- rows


def hinted_prompt(prompt_ids: IntArray, hint_ids: IntArray, tags: UserTags, *, max_hint_tokens: int) -> IntArray:
    """P[:k] + the first `max_hint_tokens` of the hint + P[k:], k being `insertion_place`; P itself if that is none."""
    kept = hint_ids[: max(max_hint_tokens, 0)]
    return prompt_ids if not len(kept) else np.insert(prompt_ids, insertion_place(prompt_ids, tags), kept)


def hinted_row(row: Row, hint_ids: IntArray, tags: UserTags, *, max_hint_tokens: int, max_row_tokens: int) -> Row:
    """The row with a hint in its prompt: same response and loss mask, scores left out.

    Only the hint is cut, at its end: to `max_hint_tokens`, and so that the row keeps within `max_row_tokens`.
    UserTagNotFound naming the row.
    """
    room = min(max_hint_tokens, max_row_tokens - row.num_tokens)
    prompt, response = np.split(row.token_ids, [row.num_prompt_tokens])
    try:
        prompt = hinted_prompt(prompt, hint_ids, tags, max_hint_tokens=room)
    except UserTagNotFound as error:
        raise UserTagNotFound(f"row {row.label}: {error}") from error
    return Row(
        uid=row.uid,
        sample_index=row.sample_index,
        token_ids=np.concatenate([prompt, response]),
        num_prompt_tokens=len(prompt),
        loss_mask=row.loss_mask,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class HintedRows:
    """Rows to score, in the order of those they were made from. has_hint: [B] bool; the others have their own prompt.

    num_hint_tokens: [B] tokens of the hint that a row got. truncated: [B] bool, the hint was longer.
    """

    rows: tuple[Row, ...]
    has_hint: BoolArray
    num_hint_tokens: IntArray
    truncated: BoolArray

    def metrics(self) -> dict[str, float]:
        """Mean tokens of the hints that rows got, and shares of rows whose hint was cut and that got none."""
        if not self.rows:
            return {}
        return {
            "cpo/hint_len_mean": float(self.num_hint_tokens.sum() / max(self.has_hint.sum(), 1)),
            "cpo/hint_truncated_frac": float(self.truncated.mean()),
            "cpo/hint_missing_frac": float(1 - self.has_hint.mean()),
        }


def hinted_rows(
    rows: Sequence[Row], hints: Hints, tags: UserTags, cfg: HintConfig, *, max_row_tokens: int
) -> HintedRows:
    """Every row with its prompt's hint. A prompt without a user tag has none, or with `on_missing=error` raises."""
    made: list[Row] = []
    for row in rows:
        try:
            made.append(
                hinted_row(row, hints[row.uid], tags, max_hint_tokens=cfg.max_tokens, max_row_tokens=max_row_tokens)
            )
        except UserTagNotFound:
            if cfg.on_missing == "error":
                raise
            made.append(row)
    num_hint_tokens = np.array([h.num_tokens - r.num_tokens for r, h in zip(rows, made, strict=True)], np.int64)
    full = np.array([len(hints[row.uid]) for row in rows], np.int64)
    return HintedRows(
        rows=tuple(made),
        has_hint=num_hint_tokens > 0,
        num_hint_tokens=num_hint_tokens,
        truncated=num_hint_tokens < full,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PaddedRow:
    """A row of a left-padded batch, [L + R]: L columns of prompt, then the response.

    Positions count attended tokens from 0 and go on after the end; they are 0 on the left padding.
    """

    input_ids: IntArray
    attention_mask: IntArray
    position_ids: IntArray
    num_prompt_columns: int


def inject_hint_padded(row: PaddedRow, hint_ids: IntArray, tags: UserTags) -> PaddedRow:
    """The same rules for left-padded rows: the hint takes the place of as many pads, its first tokens if they are few.

    Columns of the response do not move. Nothing but pads, told by the attention mask, is lost.
    """
    columns = row.num_prompt_columns
    num_pads = columns - int(row.attention_mask[:columns].sum())
    prompt = hinted_prompt(row.input_ids[num_pads:columns], hint_ids, tags, max_hint_tokens=num_pads)
    pads_left = columns - len(prompt)
    attention = np.concatenate([np.zeros(pads_left), np.ones(len(prompt)), row.attention_mask[columns:]])
    return PaddedRow(
        input_ids=np.concatenate([row.input_ids[:pads_left], prompt, row.input_ids[columns:]]),
        attention_mask=attention.astype(np.int64),
        position_ids=np.maximum(np.arange(len(attention)) - pads_left, 0),
        num_prompt_columns=columns,
    )
