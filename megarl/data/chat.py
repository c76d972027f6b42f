"""Encode chats as token ids with the tokenizer's chat template, and load tokenizers, from local directories only."""

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

from jinja2 import TemplateError

from megarl.data.harmony import in_channels, is_harmony, template_fields
from megarl.data.pieces import encode_texts
from megarl.data.thoughts import after_prompt, has_thought
from megarl.data.tokenizer_files import check_copies, parse_template, read_tokenizer
from megarl.errors import ConfigError, DataError
from megarl.types import Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


# Given turns that it does not expect, an expression of a template may raise these besides Jinja's own errors.
_TEMPLATE_ERRORS = (TemplateError, ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)


class TemplateRefusal(DataError):  # noqa: N818 - the template's decision, not a fault of the program
    """The error of a chat that the chat template does not render; `reason` is what the template says."""

    def __init__(self, where: str, chat: Sequence[Message], error: Exception) -> None:
        said = str(error) if isinstance(error, TemplateError) else f"{type(error).__name__}: {error}"
        self.reason = " ".join(said.split())
        roles = [message.role for message in chat]
        super().__init__(
            f"{where}: the chat template refuses the roles {roles!s:.200}: {self.reason}; correct or remove the "
            "row, or give the model a template that takes it"
        )


def load_tokenizer(
    path: str | Path, key: str = "model.path", arguments: Mapping[str, object] | None = None
) -> "PreTrainedTokenizerBase":
    """Load the tokenizer of a model directory, and fix arguments of its chat template.

    key: the setting that named the directory, for messages. arguments: `data.chat_template`, applied to every chat that
    is rendered.

    Raises:
        ConfigError: a file is damaged, there is no chat template or eos token, the template is not valid Jinja, or it
            never reads an argument.
    """
    tokenizer = read_tokenizer(path, key)
    if tokenizer.chat_template is None:
        raise ConfigError(f"{key}: the tokenizer in {path} has no chat template; add chat_template.jinja")
    if tokenizer.eos_token_id is None:
        raise ConfigError(f"{key}: the tokenizer in {path} has no eos_token; set it in tokenizer_config.json")
    check_copies(Path(path))
    template, read = parse_template(tokenizer, Path(path))
    if arguments:
        free = sorted(read - tokenizer.special_tokens_map.keys())
        for name in arguments:
            if name not in free:
                reads = f"it may read {', '.join(free)}" if free else "it reads no arguments"
                raise ConfigError(f"data.chat_template.{name}: the chat template in {path} never reads this; {reads}")
        # transformers drops the line feed after a block, so that these lines write nothing. Jinja reads Python's
        # literals, True and None included.
        lines = "".join(f"{{% set {name} = {value!r} %}}\n" for name, value in arguments.items())
        tokenizer.chat_template = lines + template
    return tokenizer


def encode_chats(
    tokenizer: "PreTrainedTokenizerBase",
    chats: Sequence[Sequence[Message]],
    *,
    add_generation_prompt: bool = True,
    prefill: bool = False,
    tools: Sequence[Mapping[str, object]] = (),
    places: Sequence[str] = (),
) -> list[list[int]]:
    """Encode chats as token ids with the tokenizer's chat template.

    Args:
        add_generation_prompt: end each chat with the start of an assistant turn, as in a prompt for generation.
        prefill: leave the last turn of a chat open, without such a start, if it is the assistant's.
        tools: schemas of functions in OpenAI's form, for the template to write. ConfigError if it never reads any.
        places: where each chat comes from, for the TemplateRefusal of one that the template does not render.
    """
    texts = render_chats(
        tokenizer, chats, add_generation_prompt=add_generation_prompt, prefill=prefill, tools=tools, places=places
    )
    return encode_texts(tokenizer, texts)


def long_prompt_error(
    where: str, num_tokens: int, max_prompt_tokens: int, key: str = "data.on_long_prompt"
) -> DataError:
    """Return the error for a prompt that has more tokens than the limit; setting `key` can have it left out."""
    return DataError(
        f"{where}: the prompt has {num_tokens} tokens, data.max_prompt_tokens is {max_prompt_tokens}; "
        f"raise it or set {key}=drop"
    )


def token_texts(tokenizer: "PreTrainedTokenizerBase", ids: Sequence[int]) -> list[str]:
    """Return the text of each token. If several tokens make up one character, the last of them has its whole text."""
    decode = partial(tokenizer.decode, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    texts: list[str] = []
    # Tokens from `start` on are decoded with those before `known` as context, as spaces may depend on it.
    start = known = 0
    for end in range(1, len(ids) + 1):
        context, whole = decode(ids[start:known]), decode(ids[start:end])
        is_whole = not whole.endswith("\ufffd") or end == len(ids)
        texts.append(whole[len(context) :] if is_whole else "")
        if is_whole:
            start, known = known, end
    return texts


def require_tools(tokenizer: "PreTrainedTokenizerBase", tools: Sequence[Mapping[str, object]]) -> None:
    """Raise ConfigError if there are tools and the chat template never reads any."""
    if tools and "tools" not in str(tokenizer.get_chat_template(tools=list(tools))):
        raise ConfigError(
            "environment: the chat template writes no tools; name them in data.system_prompt, and set the argument "
            "in_prompt of the environment to false"
        )


def render_chats(
    tokenizer: "PreTrainedTokenizerBase",
    chats: Sequence[Sequence[Message]],
    *,
    add_generation_prompt: bool = True,
    prefill: bool = False,
    tools: Sequence[Mapping[str, object]] = (),
    places: Sequence[str] = (),
) -> list[str]:
    """Render chats as text with the chat template. For arguments and errors see `encode_chats`."""
    require_tools(tokenizer, tools)
    has_channels = is_harmony(tokenizer)

    def rendered(part: Sequence[Sequence[Message]]) -> list[str]:
        texts: list[str] = []
        for is_open, group in groupby(part, key=lambda chat: prefill and chat[-1].role == "assistant"):
            chats = list(group)
            if not is_open:
                texts += written(chats, opened=add_generation_prompt)
                continue
            prompts, answers = (
                written([chat[:-1] or chat for chat in chats], opened=True),
                [c[-1].content for c in chats],
            )
            if has_channels:
                texts += [prompt + in_channels(answer) for prompt, answer in zip(prompts, answers, strict=True)]
            else:
                whole = written(chats, opened=False, continued=True)
                texts += [_continued(*each) for each in zip(prompts, answers, whole, strict=True)]
        return texts

    def written(part: Sequence[Sequence[Message]], *, opened: bool, continued: bool = False) -> list[str]:
        texts: list[str] = tokenizer.apply_chat_template(
            [[_as_turn(message, has_channels=has_channels) for message in chat] for chat in part],
            tokenize=False,
            add_generation_prompt=opened,
            continue_final_message=continued,
            tools=list(tools) or None,
        )
        return texts

    try:
        return rendered(chats)
    except _TEMPLATE_ERRORS:
        # One at a time, to find which.
        for chat, where in zip(chats, places or ["a chat"] * len(chats), strict=True):
            try:
                rendered([chat])
            except _TEMPLATE_ERRORS as error:
                raise TemplateRefusal(where, chat, error) from error
        raise


def _as_turn(message: Message, *, has_channels: bool) -> dict[str, object]:
    """Return a turn as templates take it: one with images as a list of parts, one in channels as fields."""
    turn: dict[str, object] = {**message.as_dict()}
    if has_channels and message.role == "assistant":
        turn |= template_fields(message.content)
    if message.images:
        turn["content"] = message.parts(lambda image: {"type": "image"})
    return turn


def _continued(prompt: str, answer: str, whole: str) -> str:
    """Return a prompt with the beginning of its answer as the policy would write it: with its spaces, which many
    templates strip, and without a thought of the template's own.

    whole: both, as the template writes them, up to the end of the answer.
    """
    text, before = after_prompt(answer, prompt), whole.rstrip().removesuffix(answer.strip())
    if text is None:
        raise TemplateError(
            f"its prompt ends with {prompt[-20:]!r}, a thought that is closed, and the last turn thinks"
        )
    inserted = before.removeprefix(prompt) if answer.strip() and before.startswith(prompt) else ""
    kept = "" if has_thought(inserted) else inserted.removesuffix(answer[: -len(answer.lstrip())])
    return prompt + kept + text


def require_system_turn(
    tokenizer: "PreTrainedTokenizerBase", system: str | None, key: str = "data.system_prompt"
) -> None:
    """Raise ConfigError if the chat template refuses or leaves out the system turn that the setting `key` makes."""
    if system is None:
        return
    question = Message(role="user", content="?")
    remedy = "write it into user turns, or give the model a template that takes system turns"
    try:
        (without,) = render_chats(tokenizer, [[question]])
        (with_system,) = render_chats(tokenizer, [[Message(role="system", content=system), question]])
    except TemplateRefusal as error:
        raise ConfigError(f"{key}: the chat template refuses a system turn: {error.reason}; {remedy}") from error
    if system.strip() and without == with_system:
        raise ConfigError(f"{key}: the chat template leaves out system turns; {remedy}")
