"""Encode answers as a policy writes them, with the end at which engines stop, and decode them for scorers."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from jinja2 import TemplateError

from megarl.config.generation import RolloutConfig
from megarl.config.models import ModelConfig
from megarl.data.chat import render_chats
from megarl.data.harmony import END_OF_CALL, MARKS, called_tool, in_channels, is_harmony, without_channels
from megarl.data.pieces import encode, encode_pieces
from megarl.data.stop_tokens import ANSWER, QUESTION, answer_form, declared_stop_tokens, stop_tokens_in, stop_tokens_of
from megarl.data.thoughts import after_prompt, unended_thought
from megarl.errors import DataError
from megarl.types import Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Answers as policies often begin them.
_PROBES = ("The answer is 1.", "1", "So")


class Answers:
    """The encoder of answers as a policy writes them: after the template's prompt, with the end from `ends`."""

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerBase",
        *,
        declared: Sequence[int] = (),
        further: Sequence[int] = (),
        stop: Sequence[str] = (),
        stop_token_ids: Sequence[int] = (),
    ) -> None:
        """Decide how answers end; for the arguments and errors see `stop_tokens_of`.

        further: the ends that config.json names, besides those that engines read.
        """
        self._tokenizer, self._form = tokenizer, answer_form(tokenizer)
        self._lead, self._has_channels = self._form.lead or "", is_harmony(tokenizer)
        self.stop_tokens = stop_tokens_of(
            tokenizer, self._form, declared=(*declared, *further), stop=stop, stop_token_ids=stop_token_ids
        )
        # The ends that engines read in the model's files beside the template.
        self._named = {tokenizer.eos_token_id, *declared}

    @classmethod
    def of(cls, model: ModelConfig, rollout: RolloutConfig, tokenizer: "PreTrainedTokenizerBase") -> "Answers":
        """Return the encoder of a run's policy."""
        path = Path(model.path)
        return cls(
            tokenizer,
            declared=declared_stop_tokens(path),
            further=stop_tokens_in(path / "config.json"),
            stop=rollout.stop,
            stop_token_ids=rollout.stop_token_ids,
        )

    @property
    def ending(self) -> list[int] | None:
        """Return the tokens that the chat template writes after the end of an answer.

        None if the template does not reproduce prompt, answer and end as the policy writes them, for example because it
        removes or adds reasoning.
        """
        form = self._form
        if form.end_id is None or form.lead is None:
            return None
        return encode_pieces(self._tokenizer, [form.before + ANSWER.content + form.tail, form.rest])[1]

    def warnings(self, *, of_data: bool = True) -> Iterator[str]:
        """Yield what is unusual about the end of answers, and about the tokens where they begin.

        of_data: answers of a file are trained, not those of the policy alone.
        """
        if of_data and self._form.inserted and not self._has_channels:
            yield (
                f"model.path: between a prompt and its answer the chat template writes {self._form.inserted!r:.80} in "
                "whole chats; answers are trained as they stand in the data, without it; write it into them if the "
                "model is to write it, or let the template's prompt end with it (for Qwen3: "
                "data.chat_template.enable_thinking=false)"
            )
        dated = set[str]()
        if "strftime_now" in str(self._tokenizer.chat_template):
            with suppress(TemplateError):  # of a template that wants other chats
                dated = {
                    str(self._tokenizer.apply_chat_template([QUESTION.as_dict()], tokenize=False, strftime_now=now))
                    for now in (lambda _: "Zq4", lambda _: "Zq5")
                }
        if len(dated) > 1:
            yield (
                "model.path: the chat template writes the day's date into prompts, so that a run that is resumed, or "
                "evaluated, on another day has others; set it, for Llama in data.chat_template.date_string"
            )
        show, (end, *_) = self._tokenizer.convert_ids_to_tokens, self.stop_tokens.token_ids
        if self._form.end_id is not None and end not in self._named:
            yield (
                f"model.path: answers end with {show(end)!r}, as the chat template writes them, but the model's other "
                f"files name {' and '.join(repr(show(token)) for token in sorted(self._named))}; this run stops at all "
                "of these and trains the first, and exports name it in eos_token_id of generation_config.json"
            )
        prompt = self._form.before.removesuffix(self._lead)
        for probe in _PROBES if self._form.lead is not None else ():
            answer = self._lead + probe + self.stop_tokens.tails[0]
            before, ids = encode_pieces(self._tokenizer, [prompt, answer])
            whole = encode(self._tokenizer, prompt + answer)
            if whole != [*before, *ids]:
                same = next(i for i, token in enumerate(before) if whole[i : i + 1] != [token])
                yield (
                    f"model.path: the chat template's prompt ends within a token: before {probe!r} engines are given "
                    f"{show(before[same:])}, and {show(ids[:1])} follows, but in the whole chat both are "
                    f"{show(whole[same : same + 1])}; answers are trained as engines see them; let the prompt of the "
                    "template end where a token ends, for example without a space"
                )
                return

    def demonstration(self, messages: Sequence[Message], target: str, *, where: str = "demonstration") -> list[int]:
        """Encode `target` as the policy would have written it after the prompt of `messages`, its end included.

        A thought that the template's prompt already opens is not opened again (`after_prompt`).

        Raises:
            DataError: the template refuses the chat; `target` has no text, or an end anywhere but at its end; or it
                thinks though the template's prompt has closed the thought, or not though it has opened one.
        """
        answer = Message(role="assistant", content=self._without_end(target))
        (opening,) = render_chats(self._tokenizer, [messages], prefill=True, places=[where])
        begun = messages[-1].content if messages[-1].role == "assistant" else ""
        text = self._text(answer.content, opening, where, begun)
        if messages[-1].role == "assistant":
            text += self._tails(begun + text)[0]
        else:
            text = self._last(text, opening, self._closed([*messages, answer], where))
        ids = encode_pieces(self._tokenizer, [opening, text])[1]
        self._require_one_end(ids, target, where)
        return ids

    def turns(self, messages: Sequence[Message], trained: Sequence[int], *, where: str) -> tuple[list[int], list[bool]]:
        """Encode a chat up to its last answer in `trained`; return token ids, and a mask of the tokens of these
        answers. Each is encoded as the policy would have written it after the turns before it (`demonstration`).

        Raises:
            DataError: the chat template refuses the chat; or before a later answer it renders an earlier one in another
                way than the policy wrote it (for example without its thoughts), so that one sequence cannot train both.
        """
        chat = [replace(m, content=self._without_end(m.content)) if m.role == "assistant" else m for m in messages]
        openings = render_chats(self._tokenizer, [chat[:i] for i in trained], places=[where] * len(trained))
        # If the next speaker's mark ends an answer, it depends on the next turn.
        closed = self._closed(chat[: trained[-1] + (1 if len(self.stop_tokens.tails) == 1 else 2)], where)
        pieces: list[str] = []
        for i, opening, following in zip(trained, openings, [*openings[1:], None], strict=True):
            text = self._text(chat[i].content, opening, f"{where}: turn {i}")
            if following is None:
                answer = self._last(text, opening, closed)
            else:
                answer = self._repeated(text, opening, following, i, where)
            pieces += [opening[sum(map(len, pieces)) :], answer]
        mark = "" if self._form.end_id is None else str(self._tokenizer.convert_ids_to_tokens(self._form.end_id))
        encoded = encode_pieces(self._tokenizer, pieces, mark=mark)
        for i, ids in zip(trained, encoded[1::2], strict=True):
            self._require_one_end(ids, messages[i].content, f"{where}: turn {i}")
        mask = [number % 2 == 1 for number, ids in enumerate(encoded) for _ in ids]
        return [token for ids in encoded for token in ids], mask

    def _closed(self, chat: Sequence[Message], where: str) -> str:
        """Render a chat that ends with an answer; empty if the template writes no answers, or refuses them."""
        if not self._form.before:
            return ""
        return render_chats(self._tokenizer, [chat], add_generation_prompt=False, places=[where])[0]

    def _without_end(self, content: str) -> str:
        """Return an answer without the end that its author may have written already."""
        names = self._tokenizer.convert_ids_to_tokens(list(self.stop_tokens.declared))
        ends = (self.stop_tokens.tails[0].strip(), *(name for name in names if name))
        return content.removesuffix(next((end for end in ends if content.endswith(end)), ""))

    def _text(self, content: str, opening: str, where: str, begun: str = "") -> str:
        """Return the text that the policy writes after the prompt `opening`; DataError if there is none.

        begun: the beginning of the answer that the prompt ends with.
        """
        if not content.strip() or self.stop_tokens.tails[0].strip() in content:
            raise self._target_error(content, where)
        if self._has_channels and not begun:
            content = in_channels(content)
        text, mark = after_prompt(content, opening), unended_thought(content, opening, begun)
        problem = f"{where}: the answer is {content[:80]!r}, but the chat template's prompt ends with {opening[-20:]!r}"
        if text is None:
            raise DataError(
                f"{problem}, a thought that is closed already; remove the thought from the answer, or let the template "
                "open one, with an argument in data.chat_template such as enable_thinking=true"
            )
        if mark:
            raise DataError(
                f"{problem}, so that the answer would be trained as a thought that never ends; begin it with {mark} "
                "or with a thought that ends, or let the template open none, with an argument in data.chat_template "
                "such as enable_thinking=false"
            )
        if not text.strip():
            raise self._target_error(content, where)
        return text

    def _tails(self, text: str) -> tuple[str, ...]:
        """Return the texts that may end an answer: those of `stop_tokens`, but for a call in harmony."""
        return (END_OF_CALL,) if self._has_channels and called_tool(text) else self.stop_tokens.tails

    def _last(self, text: str, opening: str, closed: str) -> str:
        """Return the last answer with its end, as the template has it in the chat `closed` if it repeats the answer."""
        tails = self._tails(text)
        # Many templates strip the answers that they repeat.
        for answer in (self._lead + text, self._lead + text.strip()):
            for tail in (*tails, self._form.tail):
                if closed.startswith(opening + answer + tail):
                    return answer + (tail if tail in tails else tails[0])
        return self._lead + text + tails[0]

    def _repeated(self, text: str, opening: str, following: str, turn: int, where: str) -> str:
        """Return an answer with its end, as the template repeats it in the prompt `following` for a later one."""
        remedy = "set sft.train_on to each, for a row per answer, or to last"
        if not following.startswith(opening):
            raise DataError(
                f"{where}: up to turn {turn} the chat template renders {opening[-80:]!r}, but the whole chat goes on "
                f"from {following[: len(opening)][-80:]!r}; {remedy}"
            )
        for answer in (self._lead + text, self._lead + text.strip()):
            for tail in self._tails(text):
                if following.startswith(opening + answer + tail):
                    return answer + tail
        raise DataError(
            f"{where}: before the next answer, the chat template renders turn {turn} as "
            f"{following[len(opening) :][:80]!r}, expected {text[:40]!r} and {self.stop_tokens.tails[0]!r}; {remedy}"
        )

    def _require_one_end(self, ids: Sequence[int], target: str, where: str) -> None:
        found = next(
            (token for token in ids[: -len(self.stop_tokens.token_ids)] if token in self.stop_tokens.declared), None
        )
        if found is not None:
            raise self._target_error(target, where, str(self._tokenizer.convert_ids_to_tokens(found)))

    def _target_error(self, target: str, where: str, end: str | None = None) -> DataError:
        return DataError(
            f"{where}: the target is {target[:80]!r}, expected text with {end or self.stop_tokens.tails[0]!r} nowhere "
            "but at its end; correct or remove the row"
        )


def response_decoder(
    tokenizer: "PreTrainedTokenizerBase", *, keeps_channels: bool = True
) -> Callable[[Sequence[int]], str]:
    """Return a function that decodes response ids to the text that scorers and environments read.

    It has no marks of a chat's turns, no unnamed special token at its end, where engines stopped, and not the token
    that ends an answer, even if the tokenizer does not call it special. Other special tokens are words of the policy,
    such as those around thoughts, answers and calls of tools, and those of channels (`megarl.data.harmony`), which
    would be turns of a judge's own prompt: scorers read none.
    """
    from transformers import PreTrainedTokenizerFast

    is_plain = getattr(type(tokenizer), "_decode", None) is PreTrainedTokenizerFast._decode
    form = answer_form(tokenizer)
    special = {id: token.content for id, token in tokenizer.added_tokens_decoder.items() if token.special}
    special |= dict(zip(tokenizer.all_special_ids, tokenizer.all_special_tokens, strict=True))
    named = {getattr(tokenizer, name) for name in tokenizer.SPECIAL_TOKENS_ATTRIBUTES}
    # Templates write thoughts of their own, and describe them; the mark with a slash has a partner without.
    closed = {mark.replace("/", "", 1) for mark in special.values() if "/" in mark}
    spans = {mark for mark in special.values() if mark.replace("/", "", 1) in closed} - named
    written = form.before + form.tail + form.rest + form.next_tail
    lone = {id for id, mark in special.items() if mark not in spans}
    kept_marks = MARKS if is_harmony(tokenizer) else ()
    dropped = {id for id in lone if special[id] in named or special[id] in written} | {form.end_id}
    dropped -= {id for id, mark in special.items() if mark in kept_marks}

    def decode(ids: Sequence[int]) -> str:
        end = len(ids) - (bool(ids) and ids[-1] in lone)
        kept = [token for token in ids[:end] if token not in dropped]
        if is_plain:  # The same text, while other threads go on.
            text = str(tokenizer.backend_tokenizer.decode_batch([kept], skip_special_tokens=False)[0])
        else:
            text = str(tokenizer.decode(kept, skip_special_tokens=False, clean_up_tokenization_spaces=False))
        return text if keeps_channels or not kept_marks else without_channels(text)

    return decode
