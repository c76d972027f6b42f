"""Encode chats as token ids with the tokenizer's chat template, and load tokenizers, from local directories only."""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError

from megarl.data.tokenizer_files import parse_template, read_tokenizer
from megarl.errors import ConfigError, DataError
from megarl.types import Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def load_tokenizer(
    path: str | Path, key: str = "model.path", arguments: Mapping[str, Any] | None = None
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
    template, read = parse_template(tokenizer, Path(path))
    if arguments:
        _require_read(arguments, read, tokenizer, path)
        # transformers drops the line feed after a block, so that these lines write nothing. Jinja reads Python's
        # literals, True and None included.
        lines = "".join(f"{{% set {name} = {value!r} %}}\n" for name, value in arguments.items())
        tokenizer.chat_template = lines + template
    return tokenizer


def check_vocabulary(tokenizer: "PreTrainedTokenizerBase", path: str, key: str) -> None:
    """Raise ConfigError unless the model at `path`, set by the setting `key`, has the same tokens as `tokenizer`."""
    ours, theirs = tokenizer.get_vocab(), read_tokenizer(path, key).get_vocab()
    if ours != theirs:
        differing = sorted(token for token in ours.keys() | theirs.keys() if ours.get(token) != theirs.get(token))
        raise ConfigError(
            f"{key}: the tokenizer in {path} differs from that of model.path in {len(differing)} tokens, such as "
            f"{differing[0]!r}; use a model with the same tokenizer"
        )


def _require_read(
    arguments: Mapping[str, Any], read: frozenset[str], tokenizer: "PreTrainedTokenizerBase", path: str | Path
) -> None:
    """Raise ConfigError if `arguments` (`data.chat_template`) has an argument that is none of the variables that the
    chat template reads.
    """
    free = sorted(read - tokenizer.special_tokens_map.keys())
    for name in arguments:
        if name not in free:
            reads = f"it may read {', '.join(free)}" if free else "it reads no arguments"
            raise ConfigError(f"data.chat_template.{name}: the chat template in {path} never reads this; {reads}")


def encode_chats(
    tokenizer: "PreTrainedTokenizerBase",
    chats: Sequence[Sequence[Message]],
    *,
    add_generation_prompt: bool = True,
    tools: Sequence[Mapping[str, Any]] = (),
) -> list[list[int]]:
    """Encode chats as token ids with the tokenizer's chat template.

    Args:
        add_generation_prompt: end each chat with the start of an assistant turn, as in a prompt for generation.
        tools: schemas of functions in OpenAI's form, for the template to write. ConfigError if it never reads any.
    """
    texts = render_chats(tokenizer, chats, add_generation_prompt=add_generation_prompt, tools=tools)
    ids: list[list[int]] = tokenizer(texts, add_special_tokens=False, return_attention_mask=False)["input_ids"]
    return ids


def long_prompt_error(
    where: str, num_tokens: int, max_prompt_tokens: int, key: str = "data.on_long_prompt"
) -> DataError:
    """Return the error for a prompt that has more tokens than the limit; setting `key` can have it left out."""
    return DataError(
        f"{where}: the prompt has {num_tokens} tokens, data.max_prompt_tokens is {max_prompt_tokens}; "
        f"raise it or set {key}=drop"
    )


def encode_whole(
    tokenizer: "PreTrainedTokenizerBase", messages: Sequence[Message], *, where: str
) -> tuple[list[int], list[bool]]:
    """Encode a chat as the chat template renders it; return token ids, and a mask of all but the first of them.

    Raises DataError, which names the row (`where`), if the chat template refuses the chat.
    """
    (text,) = render_row(tokenizer, [messages], where, add_generation_prompt=False)
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids, [False] + [True] * (len(ids) - 1)


def render_row(
    tokenizer: "PreTrainedTokenizerBase",
    chats: Sequence[Sequence[Message]],
    where: str,
    *,
    add_generation_prompt: bool = True,
) -> list[str]:
    """Render chats of one row, whose name is `where`; DataError if the template refuses them."""
    try:
        return render_chats(tokenizer, chats, add_generation_prompt=add_generation_prompt)
    except TemplateError as error:
        raise DataError(
            f"{where}: the chat template refuses the roles {[message.role for message in chats[-1]]}: {error}; correct "
            "or remove the row"
        ) from error


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


def render_chats(
    tokenizer: "PreTrainedTokenizerBase",
    chats: Sequence[Sequence[Message]],
    *,
    add_generation_prompt: bool = True,
    tools: Sequence[Mapping[str, Any]] = (),
) -> list[str]:
    """Render chats as text with the chat template. For the arguments see `encode_chats`."""
    if tools and "tools" not in str(tokenizer.get_chat_template(tools=list(tools))):
        raise ConfigError(
            "environment: the chat template writes no tools; name them in data.system_prompt, and set the argument "
            "in_prompt of the environment to false"
        )
    conversations = [[message.as_dict() for message in chat] for chat in chats]
    texts: list[str] = tokenizer.apply_chat_template(
        conversations, tokenize=False, add_generation_prompt=add_generation_prompt, tools=list(tools) or None
    )
    return texts
