"""Write hints into prompts for the forward pass of CPO (`megarl.algos.cpo`). Sampling and evaluation never see hints.

A hint, such as the solution, becomes part of the prompt's messages before the chat template renders them, so that the
text around the hint is tokenised as in an ordinary chat. A hinted row has the prompt with the hint and the response
that was sampled without it; the trainer computes the log-probs of that response. The hinted prompt depends only on the
prompt, so all samples of a prompt have the same hint.
"""

import functools
import random
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import takewhile
from typing import TYPE_CHECKING

import numpy as np

from megarl.config.algo import HintConfig
from megarl.data.chat import TemplateRefusal, render_chats
from megarl.data.prompts import ToolsOf, no_tools
from megarl.data.vocabulary import EVERY_TOKEN, Vocabulary
from megarl.errors import DataError
from megarl.types import BoolArray, IdArray, Message, Prompt, Row

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Keys of extra_info by algo.cpo.hint.source, the first one present counts; an answer may also be the ground truth.
_KEYS: Mapping[str, tuple[str, ...]] = {
    "solution": ("gold_solution", "solution"),
    "answer": ("ground_truth",),
    "demonstration": (),
}
# Stands for the hint while its place is found; these characters are for private use, so that no chat has them.
_MARKER = "\ue0a7\ue1b8\ue2c9"


class Missing(StrEnum):
    """The reasons for which a prompt may have no hint."""

    NO_TEXT = "no_text"
    NO_PLACE = "no_place"
    NO_ROOM = "no_room"


class UserTagNotFound(DataError):  # noqa: N818 - the name under which the rule is known
    """The error for a chat that has no turn into which the hint can be written, where a hint is required."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HintedPrompt:
    """A prompt with its hint as token ids, or the prompt alone if it has no hint.

    num_hint_tokens: tokens of the hint itself. is_cut: whether the hint was shortened. missing: why there is no hint,
    or None. text: the rendered text before the hint, the hint, and the text after it; empty if there is no hint.
    """

    token_ids: IdArray
    num_hint_tokens: int = 0
    is_cut: bool = False
    missing: Missing | None = None
    text: tuple[str, str, str] = ("", "", "")


def hint_text(prompt: Prompt, cfg: HintConfig) -> str | None:
    """Return the text of a prompt's hint, or None if it has no hint. Raises DataError if the hint is not a string."""
    if cfg.source == "demonstration" and cfg.field is None:
        return prompt.target if prompt.target.strip() else None
    keys = _KEYS[cfg.source] if cfg.field is None else (cfg.field,)
    candidates = {f"extra_info.{key}": prompt.extra_info.get(key) for key in keys}
    if cfg.source == "answer" and cfg.field is None:
        candidates["reward_model.ground_truth"] = prompt.ground_truth
    for key, text in candidates.items():
        if text is not None and not isinstance(text, str):
            raise DataError(f"prompt {prompt.uid}: {key} is {type(text).__name__}, expected a string for its hint")
        if text and text.strip():
            return text
    return None


def hinted_messages(messages: Sequence[Message], hint: str, cfg: HintConfig) -> tuple[Message, ...]:
    """Write a hint into a chat at the place `cfg.place`; the result is empty if the chat has no such place."""
    if cfg.place == "system":
        written = cfg.text.replace("{hint}", hint)
        if messages and messages[0].role == "system":
            return (replace(messages[0], content=messages[0].content + written), *messages[1:])
        return (Message(role="system", content=hint if cfg.template is None else written), *messages)
    last = max((i for i, message in enumerate(messages) if message.role == "user"), default=None)
    if last is None:
        return ()
    form = {
        "before_question": cfg.text + "{question}",
        "after_question": "{question}" + cfg.text,
        "user_turn": cfg.text,
    }[cfg.place]
    parts = {"{question}": messages[last].content, "{hint}": hint}
    # In one pass, so that what looks like a place in a question or a hint is none.
    content = re.sub(r"\{question\}|\{hint\}", lambda found: parts[found[0]], form)
    return (*messages[:last], replace(messages[last], content=content), *messages[last + 1 :])


class HintPlacer:
    """A writer of hints into prompts. It shortens hints to `cfg.max_tokens`, and further if the prompt would be too
    long. tools_of: returns the schemas of an environment's tools, which stand in the prompts as in those without hints.
    vocabulary: DataError for a token without a row in the model's embedding.
    """

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerBase",
        cfg: HintConfig,
        *,
        max_prompt_tokens: int,
        tools_of: ToolsOf = no_tools,
        vocabulary: Vocabulary = EVERY_TOKEN,
    ) -> None:
        self._vocabulary = vocabulary
        self.cfg, self.max_prompt_tokens, self._tokenizer = cfg, max_prompt_tokens, tokenizer
        self._tools_of = functools.cache(tools_of)

    def place(self, prompt: Prompt, donor: Prompt | None = None) -> HintedPrompt:
        """Return the prompt with its own hint or, if `donor` is given, with the hint of that other prompt.

        Raises:
            DataError: there is no hint, and `on_missing` is error; the message names the prompt and the reason.
        """
        donor = donor or prompt
        found = self._place(prompt, hint_text(donor, self.cfg))
        if found.missing is not None and self.cfg.on_missing == "error":
            error = UserTagNotFound if found.missing is Missing.NO_PLACE else DataError
            raise error(
                f"prompt {prompt.uid}: has no hint: {self.explain(found.missing)}; correct that, or set "
                f"algo.cpo.hint.on_missing=skip_row"
            )
        return found

    def place_all(
        self, prompts: Mapping[str, Prompt], donated: Mapping[str, str] | None = None
    ) -> dict[str, HintedPrompt]:
        """Write hints into prompts, own or with `donated` those of other prompts (`donors`); return them by uid."""
        if donated is None:
            return {uid: self.place(prompt) for uid, prompt in prompts.items()}
        return {
            uid: self.place(prompt, prompts[donated[uid]])
            if uid in donated
            else HintedPrompt(token_ids=np.asarray(prompt.token_ids, dtype=np.int32), missing=Missing.NO_TEXT)
            for uid, prompt in prompts.items()
        }

    def explain(self, missing: Missing) -> str:
        """Explain in words why a hint is missing: what was expected, and which setting is responsible."""
        cfg = self.cfg
        if missing is Missing.NO_TEXT:
            keys = _KEYS[cfg.source] if cfg.field is None else (cfg.field,)
            chosen = f"source={cfg.source}" if cfg.field is None else f"field={cfg.field}"
            named = [f"extra_info.{key}" for key in keys] or ["the column data.target_key"]
            places = " or ".join([*named, *([] if cfg.field is None else [f"the column {cfg.field}"])])
            return f"expected text in {places} (algo.cpo.hint.{chosen})"
        if missing is Missing.NO_PLACE:
            turn = "system turn" if cfg.place == "system" else "user turn"
            return (
                f"the chat has no {turn} in which the model's chat template writes it (algo.cpo.hint.place={cfg.place})"
            )
        return (
            f"prompt and hint may have {self.max_prompt_tokens} tokens, which is what actor.micro_batch_tokens (with "
            f"full_kl, half of them) and the model's context leave beside rollout.max_response_tokens"
        )

    def _place(self, prompt: Prompt, hint: str | None) -> HintedPrompt:
        token_ids = np.asarray(prompt.token_ids, dtype=np.int32)
        if hint is None:
            return HintedPrompt(token_ids=token_ids, missing=Missing.NO_TEXT)
        parts = self._rendered(prompt, hint)
        if parts is None:
            return HintedPrompt(token_ids=token_ids, missing=Missing.NO_PLACE)
        before, text, after = parts
        tokens = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        count = min(len(tokens), self.cfg.max_tokens)
        while count > 0:
            kept = text if count == len(tokens) else self._beginning(text, count)
            if not kept.strip():
                break
            ids, of_hint = self._tokenizer([before + kept + after, kept], add_special_tokens=False)["input_ids"]
            # A hint that was cut may merge with the text after it, and a cut within a character keeps all of it.
            excess = max(len(ids) - self.max_prompt_tokens, len(of_hint) - self.cfg.max_tokens)
            if excess <= 0:
                self._vocabulary.require(ids, f"prompt {prompt.uid} with its hint")
                return HintedPrompt(
                    token_ids=np.asarray(ids, dtype=np.int32),
                    num_hint_tokens=len(of_hint),
                    is_cut=len(kept) < len(text),
                    text=(before, kept, after),
                )
            count -= excess
        return HintedPrompt(token_ids=token_ids, missing=Missing.NO_ROOM)

    def _rendered(self, prompt: Prompt, hint: str) -> tuple[str, str, str] | None:
        """Render a chat with a hint; return the text before the hint, the hint, and the text after it.

        Returns None if the chat has no place for the hint. The template may change the hint, for example strip it; so a
        second rendering with a unique placeholder shows where the hint stands.
        """
        marked, hinted = (hinted_messages(prompt.messages, text, self.cfg) for text in (_MARKER, hint))
        if not hinted:
            return None
        try:
            tools = self._tools_of(prompt.environment) if prompt.environment else ()
            with_marker, whole = render_chats(self._tokenizer, [marked, hinted], prefill=True, tools=tools)
        except TemplateRefusal:
            return None
        before, *rest = with_marker.split(_MARKER)
        if len(rest) != 1 or not (whole.startswith(before) and whole.endswith(rest[0])):
            return None
        found = whole[len(before) : len(whole) - len(rest[0])]
        return (before, found, rest[0]) if found else None

    def _beginning(self, text: str, num_tokens: int) -> str:
        """Return the part of a text that its first `num_tokens` tokens stand for."""
        if self._tokenizer.is_fast:
            offsets = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
            return text[: offsets[num_tokens - 1][1]]
        ids = self._tokenizer(text, add_special_tokens=False)["input_ids"][:num_tokens]
        decoded = self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        num_equal = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(text, decoded, strict=False)))
        return text[:num_equal]


def donors(hinted: Mapping[str, HintedPrompt], *, seed: int) -> dict[str, str]:
    """Pair each prompt that has a hint with another one, whose hint it receives; the pairs form one cycle, drawn by
    `seed`.

    The order of `hinted` has no effect. The result is empty if fewer than two prompts have a hint.
    """
    uids = sorted(uid for uid, prompt in hinted.items() if prompt.missing is None)
    random.Random(seed).shuffle(uids)
    return dict(zip(uids, [*uids[1:], *uids[:1]], strict=True)) if len(uids) > 1 else {}


@dataclass(frozen=True, slots=True, kw_only=True)
class HintedRows:
    """Copies of rows (samples) whose prompts have hints, in the rows' order, and the hinted prompt of each row."""

    rows: tuple[Row, ...]
    prompts: tuple[HintedPrompt, ...]

    @property
    def has_hint(self) -> BoolArray:
        """Return [B] bool, true for rows with a hint; a row without one keeps its own prompt."""
        return np.array([prompt.missing is None for prompt in self.prompts], dtype=np.bool_)

    def metrics(self) -> dict[str, float]:
        """Return the mean number of tokens of a hint, and the fractions of rows whose hint was cut or missing."""
        if not self.rows:
            return {}
        count, missing = len(self.rows), Counter(prompt.missing for prompt in self.prompts)
        return {
            "cpo/hint_len_mean": sum(p.num_hint_tokens for p in self.prompts) / max(missing[None], 1),
            "cpo/hint_truncated_frac": sum(p.is_cut for p in self.prompts) / count,
            "cpo/hint_no_text_frac": missing[Missing.NO_TEXT] / count,
            "cpo/hint_no_place_frac": missing[Missing.NO_PLACE] / count,
            "cpo/hint_no_room_frac": missing[Missing.NO_ROOM] / count,
        }


def hinted_rows(rows: Sequence[Row], prompts: Mapping[str, HintedPrompt]) -> HintedRows:
    """Replace every row's prompt by its hinted prompt. Response and loss mask are kept, quantities are left out.

    Branches of a conversation that does not go on from its whole prompt do not read the hint.
    """
    chosen = tuple(prompts[row.uid] for row in rows)
    made = (row.after_prompt(prompt.token_ids) for row, prompt in zip(rows, chosen, strict=True))
    return HintedRows(rows=tuple(made), prompts=chosen)


@dataclass(frozen=True, slots=True, kw_only=True)
class HintSurvey:
    """Counts of how many prompts have a hint, have a shortened hint, or lack one.

    counts: by data source, the numbers of prompts, of hints, of shortened hints, and of missing hints by reason.
    fields: the fields of extra_info that contain text in at least one prompt.
    """

    counts: Mapping[str, Counter[str]]
    fields: frozenset[str]

    @property
    def total(self) -> Counter[str]:
        """Sum the counts over the data sources."""
        return sum(self.counts.values(), Counter())

    def require_some(self, placer: HintPlacer) -> None:
        """Raise DataError if not a single prompt has a hint."""
        total = self.total
        if total["placed"]:
            return
        reason, fields = max(Missing, key=lambda missing: total[missing]), ", ".join(sorted(self.fields)) or "none"
        remedy = {
            Missing.NO_TEXT: f"set algo.cpo.hint.field to a field with text, of which there are: {fields}",
            Missing.NO_PLACE: "choose another algo.cpo.hint.place",
            Missing.NO_ROOM: "raise actor.micro_batch_tokens, or lower rollout.max_response_tokens",
        }[reason]
        others = ", ".join(f"{total[m]} {m.replace('_', ' ')}" for m in Missing if m is not reason and total[m])
        raise DataError(
            f"data.train: no prompt has a hint: {placer.explain(reason)}{f' (of others: {others})' if others else ''}; "
            f"{remedy}, or set algo.cpo.method=none"
        )

    def warnings(self, placer: HintPlacer) -> list[str]:
        """Return warnings about missing and shortened hints, with what to do about them."""
        total, found = self.total, []
        for missing in Missing:
            if count := total[missing]:
                found.append(
                    f"data.train: {count} of {total['prompts']} prompts train without a hint: {placer.explain(missing)}"
                )
        if total["cut"]:
            found.append(
                f"data.train: {total['cut']} of {total['placed']} hints are cut; raise algo.cpo.hint.max_tokens="
                f"{placer.cfg.max_tokens}, or make room with a higher actor.micro_batch_tokens or a lower "
                f"rollout.max_response_tokens"
            )
        return found


def survey_hints(placer: HintPlacer, prompts: Iterable[Prompt]) -> HintSurvey:
    """Try to write a hint into every prompt, and count successes, shortened hints and failures."""
    counts: defaultdict[str, Counter[str]] = defaultdict(Counter)
    fields: set[str] = set()
    for prompt in prompts:
        found = placer.place(prompt)
        outcome = ["placed", *(["cut"] if found.is_cut else [])] if found.missing is None else [found.missing.value]
        counts[prompt.data_source].update(["prompts", *outcome])
        fields.update(key for key, text in prompt.extra_info.items() if isinstance(text, str) and text.strip())
    return HintSurvey(counts=counts, fields=frozenset(fields))
