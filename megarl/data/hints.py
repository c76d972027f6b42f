"""Insert hints after the last user tag of prompts, for one additional scoring pass.

A hinted row is made from a row that was already sampled, has the same response and is only scored. So a hint never
reaches the rollout engine, evaluation or the logged texts.
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

# Token ids of hints by the uid of their prompt; prompts without a hint are absent.
Hints: TypeAlias = Mapping[str, IntArray]

# Keys of extra_info that may hold the hint, by algo.cpo.hint.source; the last choice for answer is the ground truth.
_KEYS: Mapping[str, tuple[str, ...]] = {"solution": ("gold_solution", "solution"), "answer": ("ground_truth",)}

# Contents of turns that no chat template writes itself.
_FIRST, _REPLY, _SECOND = "Q0Z0Q", "A1Z1A", "Q2Z2Q"


class UserTagNotFound(DataError):  # noqa: N818 - the name under which the rule is known
    """Report that a prompt has no user tag after which a hint could be inserted."""


# --- texts


def hint_text(prompt: Prompt, cfg: HintConfig) -> str | None:
    """Return the prompt's hint within its template, or None (DataError with `on_missing=error`) if it has no hint."""
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
    """Raise DataError at a run's start if no prompt has a hint or, with `on_missing=error`, if any prompt lacks one."""
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
    """Encode the prompts' hints as token ids, without truncating them."""
    texts = {prompt.uid: hint_text(prompt, cfg) for prompt in prompts}
    return {
        uid: np.asarray(tokenizer(text, add_special_tokens=False)["input_ids"] if text else [], dtype=np.int64)
        for uid, text in texts.items()
    }


def shuffled_hints(hints: Hints, *, seed: int) -> Hints:
    """Give each prompt that has a hint the hint of another prompt, by a cyclic shift in an order that `seed` decides.

    The result does not depend on the order of `hints`. If there is only one hint, its prompt gets an empty one.
    """
    uids = sorted(uid for uid, ids in hints.items() if len(ids))
    random.Random(seed).shuffle(uids)
    donors = dict(zip(uids, [*uids[1:], *uids[:1]], strict=True)) if len(uids) > 1 else {}
    return {uid: hints[donors[uid]] if uid in donors else np.empty(0, np.int64) for uid in hints}


# --- where a hint stands


@dataclass(frozen=True, slots=True, kw_only=True)
class UserTags:
    """Hold the token ids that a template writes before a user's text: after another turn, and at a chat's start."""

    after_turn: tuple[int, ...]
    at_start: tuple[int, ...]


def user_tags(tokenizer: PreTrainedTokenizerBase) -> UserTags:
    """Find the user tags of the tokenizer's chat template, by rendering a chat with known contents.

    Raises:
        ConfigError: the template cannot render such a chat, or the tag's tokens merge with their surroundings.
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
    # The tag at a chat's start is the longest common suffix of that start and of the tag between turns.
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
    """Return the index of the token right after the prompt's last user tag, where its last user turn begins.

    The tag that follows a turn is searched for first, then the one at a chat's start. Raises UserTagNotFound.
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
    """Return the index after the last occurrence of `tag` in `ids`, or None if there is none."""
    values, n = [int(i) for i in ids], len(tag)
    ends = (end for end in range(len(values), n - 1, -1) if tuple(values[end - n : end]) == tuple(tag))
    return next(ends, None)


# --- rows


def hinted_row(row: Row, hint_ids: IntArray, tags: UserTags, *, max_hint_tokens: int, max_row_tokens: int) -> Row:
    """Insert a hint into the row's prompt P: P[:k] + hint + P[k:] with k = `insertion_place`; P itself without a hint.

    The new row keeps response and loss mask but no scores. Only the hint is truncated, at its end: to
    `max_hint_tokens`, and further if the row would exceed `max_row_tokens`.

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
    """Hold hinted rows to score, in the order of the rows that they were made from.

    has_hint: [B] bool; rows without a hint have their own prompt. num_hint_tokens: [B] number of hint tokens that were
    inserted. truncated: [B] bool, whether the hint was longer than that.
    """

    rows: tuple[Row, ...]
    has_hint: BoolArray
    num_hint_tokens: IntArray
    truncated: BoolArray

    def metrics(self) -> dict[str, float]:
        """Return the mean length of inserted hints, and the shares of rows whose hint was truncated or missing."""
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
    """Insert hints into rows. Where the user tag is missing, a row gets none, or `on_missing=error` raises."""
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
