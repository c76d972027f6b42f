"""Hints: texts written after the last user tag of a prompt for one more scoring pass, and nowhere else.

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
    """Raised where a prompt has no user tag after which a hint could stand."""


# --- texts


def hint_text(prompt: Prompt, cfg: HintConfig) -> str | None:
    """Write the prompt's hint in its template; None without one, or a DataError if `on_missing` is error."""
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
    """Raise DataError if no prompt has a hint, or with `on_missing=error` if one has none; for the start of a run."""
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
    """Encode the prompts' hints as token ids, uncut."""
    texts = {prompt.uid: hint_text(prompt, cfg) for prompt in prompts}
    return {
        uid: np.asarray(tokenizer(text, add_special_tokens=False)["input_ids"] if text else [], dtype=np.int64)
        for uid, text in texts.items()
    }


def shuffled_hints(hints: Hints, *, seed: int) -> Hints:
    """Give each prompt that has a hint the hint of another one: a cycle in an order that `seed` decides.

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
    """Find the user tags of the tokenizer's chat template, by rendering a chat with known contents.

    Raises:
        ConfigError: the template cannot render one, or the tag's tokens cannot be told from their surroundings.
    """
    roles = ("user", "assistant", "user")
    chat = [{"role": r, "content": c} for r, c in zip(roles, (_FIRST, _REPLY, _SECOND), strict=True)]
    try:
        text: str = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    except TemplateError as error:
        raise ConfigError(f"model.path: the chat template does not render user, assistant, user: {error}") from error
    if not text.find(_FIRST) < text.find(_REPLY) < text.find(_SECOND) or _FIRST not in text:
        raise ConfigError(f"model.path: the chat template does not keep the contents of a chat: it wrote {text!r}")
    tag_text = text.partition(_REPLY)[2].partition(_SECOND)[0]
    opening, after_turn, ids = (
        tokenizer(part, add_special_tokens=False)["input_ids"] for part in (text.partition(_FIRST)[0], tag_text, text)
    )
    # What a chat's start has in common with the tag between turns: their longest common suffix.
    pairs = zip(reversed(opening), reversed(after_turn), strict=False)
    num_equal = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    at_start = after_turn[len(after_turn) - num_equal :]
    place = _last_place(ids, at_start)
    keep_text = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
    found = (
        place == _last_place(ids, after_turn)
        and tokenizer.decode(after_turn, **keep_text) == tag_text
        and tokenizer.decode(ids[place:], **keep_text).startswith(_SECOND)
    )
    if not at_start or not found:
        raise ConfigError(
            f"model.path: the chat template puts {tag_text!r} before what the user says, which are not tokens of "
            f"their own there; expected a tag such as '<|im_start|>user'; set algo.cpo.method=none, or use a model "
            f"with such a template"
        )
    return UserTags(after_turn=tuple(after_turn), at_start=tuple(at_start))


def insertion_place(prompt_ids: Sequence[int] | IntArray, tags: UserTags) -> int:
    """Find where the last user turn of a prompt begins: right after the last tag, in tokens from the prompt's start.

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


def _last_place(ids: Sequence[int] | IntArray, tag: Sequence[int]) -> int | None:
    """Find the end of the last occurrence of `tag` in `ids`; None if there is none."""
    values, n = [int(i) for i in ids], len(tag)
    ends = (end for end in range(len(values), n - 1, -1) if tuple(values[end - n : end]) == tuple(tag))
    return next(ends, None)


# --- rows


def hinted_row(row: Row, hint_ids: IntArray, tags: UserTags, *, max_hint_tokens: int, max_row_tokens: int) -> Row:
    """Put a hint into the row's prompt P: P[:k] + hint + P[k:] with k = `insertion_place`; P itself without a hint.

    Response and loss mask stay, scores are left out. Only the hint is cut, at its end: to `max_hint_tokens`, and so
    that the row keeps within `max_row_tokens`.

    Raises:
        UserTagNotFound: the prompt has no user tag; the message names the row.
    """
    room = min(max_hint_tokens, max_row_tokens - row.num_tokens)
    prompt, response = np.split(row.token_ids, [row.num_prompt_tokens])
    kept = hint_ids[: max(room, 0)]
    if len(kept):
        try:
            prompt = np.insert(prompt, insertion_place(prompt, tags), kept)
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
    """Rows to score, in the order of those they were made from.

    has_hint: [B] bool; rows without a hint have their own prompt. num_hint_tokens: [B] tokens of the hint that a row
    got. truncated: [B] bool, the hint was longer.
    """

    rows: tuple[Row, ...]
    has_hint: BoolArray
    num_hint_tokens: IntArray
    truncated: BoolArray

    def metrics(self) -> dict[str, float]:
        """Return the mean tokens of the hints that rows got, and the shares of rows whose hint was cut or missing."""
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
    """Put its prompt's hint into every row; without a user tag there is none, or with `on_missing=error` it raises."""
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
