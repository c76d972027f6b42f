"""Decide, in one place, how a policy's answers end.

Training and engines have to agree on it, but a model names ends in up to four places: the chat template, the tokenizer,
generation_config.json and config.json. The template decides, because the policy has seen and will see what it writes;
engines stop at the tokens of all four.
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING

from megarl.data.chat import TemplateRefusal, render_chats
from megarl.data.harmony import END_OF_CALL, is_harmony
from megarl.data.pieces import encode_pieces
from megarl.errors import ConfigError
from megarl.host.reading import MODEL_REMEDY, read_object
from megarl.types import Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Texts that no template writes itself, and that none changes.
SYSTEM = Message(role="system", content="Zq0 system")
QUESTION = Message(role="user", content="Zq1 question")
ANSWER = Message(role="assistant", content="Zq2 answer")
# Tokenizers number tokens in 32 bits.
_MAX_TOKEN_ID = 2**31


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerForm:
    """The text that a chat template writes around an answer, as far as it is the same around every answer.

    before: the text up to the answer. inserted: what the template writes of its own between the prompt and the answer,
    such as an empty thought. lead: the spaces between the prompt and the answer; None: the answer does not
    follow the prompt, as the template removes or adds reasoning. tail: what follows the answer, up to the end of the
    first token of its own (`end_id`) or, without one, to the end of the text; empty: only spaces follow. rest: what
    follows the tail. next_tail, next_id: the same where a question follows, whose mark may be the first token.
    """

    before: str = ""
    inserted: str = ""
    lead: str | None = None
    tail: str = ""
    end_id: int | None = None
    rest: str = ""
    next_tail: str = ""
    next_id: int | None = None


def answer_form(tokenizer: "PreTrainedTokenizerBase") -> AnswerForm:
    """Find out how the chat template writes an answer; the form is empty if it writes none, or changes the text.

    Raises ConfigError if the template does not write questions.
    """
    for chat in ([QUESTION], [SYSTEM, QUESTION]):
        try:
            (prompt,) = render_chats(tokenizer, [chat])
            (closed,) = render_chats(tokenizer, [[*chat, ANSWER]], add_generation_prompt=False)
            (opened,) = render_chats(tokenizer, [[*chat, ANSWER]])
        except TemplateRefusal:
            continue
        # Templates for images iterate over parts, and find none in a text.
        if QUESTION.content.lower() not in prompt.lower():
            raise ConfigError(
                f"model.path: the chat template leaves out a user's words and writes {prompt!r:.80}; it may "
                "expect lists of parts; give the model a template that takes texts"
            )
        before, found, after = closed.rpartition(ANSWER.content)
        if not found:
            break
        lead = before.removeprefix(prompt)
        # The text between an answer and the next question, if the template has such chats.
        followed: str | None = None
        with suppress(TemplateRefusal):
            (text,) = render_chats(tokenizer, [[*chat, ANSWER, QUESTION]], add_generation_prompt=False)
            between, has_next, _ = text.rpartition(ANSWER.content)[2].partition(QUESTION.content)
            followed = between if has_next else None
        pairs = zip(after, after if followed is None else followed, strict=False)
        shared = "".join(own for own, _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        # Without regard for `add_generation_prompt`, the rest may be the prompt for the next answer.
        has_rest = opened == closed and shared != after
        tail, end_id = _up_to_mark(tokenizer, shared if has_rest else after)
        if end_id is None:
            tail = "" if has_rest else shared.rstrip() or tail
        next_tail, next_id = _up_to_mark(tokenizer, followed or "")
        return AnswerForm(
            before=before,
            inserted=lead if before.startswith(prompt) and lead.strip() else "",
            lead=lead if before.startswith(prompt) and not lead.strip() else None,
            tail=tail,
            end_id=end_id,
            rest=after[len(tail) :],
            next_tail=next_tail,
            next_id=next_id,
        )
    return AnswerForm()


def _up_to_mark(tokenizer: "PreTrainedTokenizerBase", text: str) -> tuple[str, int | None]:
    """Return a text up to the first added token in it, and the token; without one, the stripped text and None."""
    marks = {mark: token for mark, token in tokenizer.get_added_vocab().items() if mark.strip()}
    found = [(text.index(mark), -len(mark), mark) for mark in marks if mark in text]
    if not found:
        return text.rstrip(), None
    start, _, mark = min(found)
    return text[: start + len(mark)], marks[mark]


def declared_stop_tokens(directory: Path) -> tuple[int, ...]:
    """Return the tokens that end a response by generation_config.json or, without it, config.json, as vLLM reads them.

    Raises ConfigError if the file is damaged, or has something other than numbers of tokens there.
    """
    file = directory / "generation_config.json"
    return stop_tokens_in(file if file.is_file() else directory / "config.json")


def stop_tokens_in(file: Path) -> tuple[int, ...]:
    """Return the tokens that end a response by a file, if there is one. For errors see `declared_stop_tokens`."""
    if not file.is_file():
        return ()
    found = read_object(file, remedy=MODEL_REMEDY, error=ConfigError).get("eos_token_id")
    ends = found if isinstance(found, list) else [] if found is None else [found]
    if not all(type(end) is int and 0 <= end < _MAX_TOKEN_ID for end in ends):
        raise ConfigError(
            f"{file}: eos_token_id is {found!r:.80}, expected the number of a token, or a list of numbers; "
            f"correct it, or {MODEL_REMEDY}"
        )
    return tuple(ends)


@dataclass(frozen=True, slots=True, kw_only=True)
class StopTokens:
    """The ends of a policy's answers.

    token_ids: what answers that are trained end with, which is one token, unless `rollout.stop` names a text. tails:
    the texts with which the chat template may end an answer, that of `token_ids` first. declared: the tokens that end
    an answer by the chat template, the tokenizer or the model's configuration. stop_token_ids: those at which engines
    stop, which has `rollout.stop_token_ids` as well. names: the texts of all ends, for messages.
    """

    token_ids: tuple[int, ...]
    tails: tuple[str, ...]
    declared: tuple[int, ...]
    stop_token_ids: tuple[int, ...]
    names: tuple[str, ...]

    def are_at_end_of(self, token_ids: Sequence[int]) -> bool:
        """Return whether a response ends with these tokens, as trained answers do."""
        return tuple(token_ids[-len(self.token_ids) :]) == self.token_ids


def stop_tokens_of(
    tokenizer: "PreTrainedTokenizerBase",
    form: AnswerForm,
    *,
    declared: Sequence[int] = (),
    stop: Sequence[str] = (),
    stop_token_ids: Sequence[int] = (),
) -> StopTokens:
    """Decide how answers end: with what the chat template writes after them.

    If it writes nothing, they end with the mark of the next speaker, provided that it is declared an end (as GLM does),
    or else with the tokenizer's eos token.

    declared: see `declared_stop_tokens`. stop, stop_token_ids: the settings of `rollout`.

    Raises ConfigError if the template ends answers with text that is not a token, unless `stop` has it, or a token that
    is declared an end stands for a piece of text.
    """
    eos: int = tokenizer.eos_token_id
    marks = {*tokenizer.get_added_vocab().values(), *tokenizer.all_special_ids}
    # Some configurations name tokens that their tokenizer lacks, which is harmless.
    if texts := [token for token in declared if token not in marks and token < len(tokenizer)]:
        raise ConfigError(
            f"model.path: eos_token_id in generation_config.json or config.json is {texts[0]}, which stands for the "
            f"text {tokenizer.decode(texts[:1])!r} in this tokenizer, so that engines would cut answers there; "
            f"correct it: the tokenizer's end is {eos}, {tokenizer.eos_token!r}"
        )
    calls = [tokenizer.convert_tokens_to_ids(END_OF_CALL)] if is_harmony(tokenizer) else []
    known = tuple(dict.fromkeys([eos, *declared, *calls]))
    shown = (*known, *stop_token_ids, *(() if form.end_id is None else (form.end_id,)))
    name = {token: tokenizer.convert_ids_to_tokens(token) or f"token {token}" for token in shown}
    if form.end_id is not None:
        tails, own = [form.tail], [form.end_id]
    elif form.tail:
        tails = [form.tail[: form.tail.index(text) + len(text)] for text in stop if text in form.tail]
        if not tails:
            raise ConfigError(
                f"model.path: the chat template ends an answer with {form.tail.strip()!r}, which is not a token of the "
                f"tokenizer, so that engines do not stop there; set rollout.stop to {[form.tail.strip()]}, or let the "
                f"template write a token such as {tokenizer.eos_token!r}"
            )
        own = encode_pieces(tokenizer, [form.before + ANSWER.content, tails[0]])[1]
    elif form.next_id is not None and form.next_id in name:
        gap = form.next_tail.removesuffix(name[form.next_id])
        tails, own = [form.next_tail, *(gap + name[token] for token in known if token != form.next_id)], [form.next_id]
    else:
        tails, own = [tokenizer.eos_token], [eos]
    ends = tuple(dict.fromkeys([*(own if len(own) == 1 else ()), *known]))
    stops = tuple(dict.fromkeys([*ends, *stop_token_ids]))
    return StopTokens(
        token_ids=tuple(own),
        tails=tuple(tails),
        declared=ends,
        stop_token_ids=stops,
        names=(*stop, *(name[token] for token in stops)),
    )
