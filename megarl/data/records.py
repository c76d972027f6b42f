"""Parse rows of prompt files, in the Parquet/JSON-lines schemas that verl, LUFFY and OpenRLHF use.

`prompt` and `target`: lists of {role, content}, or texts; `target_probs`: optional list of the
probabilities that the author of the target gave its tokens, -1 where unknown; `data_source`: string, at the top level
or in `extra_info`; `ability`: not read; `reward_model`: {style, ground_truth}; `extra_info`: any object. The
section `data` of a configuration can name other columns.

Preference rows have `chosen` and `rejected`: texts, or lists of {role, content} that end with the assistant's
answer; `prompt` (or `messages`, or what `data.prompt_key` names): a text or such a list, which may be left out if
chosen starts with it; and `margin`, an optional number.

Where a list or an object is expected, a text that is JSON of one, or Python's notation, is read as such.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megarl.config.schema import DataConfig, SftConfig
from megarl.data.messages import read_answer, read_messages, text_of
from megarl.data.roles import require_question, require_words
from megarl.data.written import read_structure, read_turns
from megarl.errors import DataError
from megarl.types import Message

if TYPE_CHECKING:
    from megarl.data.images import RowsImages

TARGET_PROBS = "target_probs"
# An answer to `prompt` besides `target`, by the names that verl and TRL give it.
_ANSWER_COLUMNS = ("response", "completion")
# A chat, by the names that OpenAI and ShareGPT give it.
CHAT_COLUMNS = ("messages", "conversations")
# Whether a turn of the assistant is imitated, by the names that trainers give it; `masked` is the opposite.
_SWITCHES = ("train", "training", "trainable", "weight", "loss", "loss_weight", "loss_mask", "step_loss_mask", "masked")
# The choices of a question, by the names that data sets give them: texts, or an object with these and their labels.
_CHOICES = ("choices", "options", "endings")
_INDEX = re.compile(r"(\d{1,2})(?:\.0)?", re.ASCII)
_MAX_MARGIN = 3.4e38  # of numbers of 32 bits
PREFERENCE_SIDES = ("chosen", "rejected")


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptRecord:
    """One parsed prompt row; `ground_truth` may be empty if a reward model judges responses (style "model").

    label: the ground truth as the row has it. indexed: the column of choices of which it may be an index; empty: none.
    """

    messages: tuple[Message, ...]
    data_source: str
    ground_truth: str
    label: object
    extra_info: Mapping[str, object]
    indexed: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class DemonstrationRecord:
    """One parsed row of supervised training: a chat, and the indices of the answers in it to imitate, ascending."""

    messages: tuple[Message, ...]
    trained: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PreferenceRecord:
    """One parsed preference row: two complete chats with one prompt, and the margin desired between their scores."""

    chosen: tuple[Message, ...]
    rejected: tuple[Message, ...]
    margin: float


def prompt_columns(form: DataConfig) -> tuple[str, ...]:
    """Return the columns that `parse_prompt` reads, whose names `form` can set."""
    label = "reward_model" if form.label_key is None else form.label_key
    # Choices complete a question, of whose column nobody knows whether it has them.
    choices = () if form.prompt_key == "question" else _CHOICES
    return (form.prompt_key, form.source_key, label, "extra_info", "system", *choices, *image_columns(form))


def image_columns(form: DataConfig) -> tuple[str, ...]:
    """Return the column with images, if one is named."""
    return () if form.image_key is None else (form.image_key,)


# The remedy for files without a required column.
NAME_COLUMNS = "set data.prompt_key and data.label_key to the columns with prompt and right answer"


def required_columns(form: DataConfig) -> tuple[str, ...]:
    """Return those of `prompt_columns` that every file has."""
    return form.prompt_key, form.label_key or "reward_model"


def parse_prompt(
    row: Mapping[str, object], where: str, form: DataConfig | None = None, images: "RowsImages | None" = None
) -> PromptRecord:
    """Parse a prompt row, with the column names in `form`; DataError names the row (`where`) and what is wrong.

    A ground truth that is not text, such as Countdown's {target, numbers}, becomes JSON. The data source may be in its
    column or in `extra_info`. Every `reward_model.style` except "model" means that a rule judges the responses.
    """
    form = form or DataConfig()
    extra_info = _mapping(row, "extra_info", where, required=False)
    if form.label_key is None:
        reward_model = _mapping(row, "reward_model", where, required=True)
        style = text_of({"style": "rule", **reward_model}, "style", f"{where}: reward_model")
        label, place = reward_model.get("ground_truth"), "reward_model: ground_truth"
        if style == "model" and label is None:
            label = ""
    else:
        label, place = row.get(form.label_key), form.label_key
    if label is None:
        raise DataError(f"{where}: {place} is missing, expected a ground truth; see data.label_key")
    if isinstance(label, str):
        text = label
    else:
        try:
            text = json.dumps(_without_nulls(label), ensure_ascii=False, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise DataError(f"{where}: {place} is {label!r:.200}, expected text or what JSON can hold") from error
    source = row.get(form.source_key) or extra_info.get(form.source_key) or form.default_source
    if source is None:
        raise DataError(
            f"{where}: {form.source_key} is missing; name the column in data.source_key, or set data.default_source"
        )
    messages = read_messages(row, form.prompt_key, where, text_role="user", images=images)
    if not form.prefill:
        require_question(messages, form.prompt_key, where)
    if images is not None:
        images.require_all()
    return PromptRecord(
        messages=_with_system(row, messages, where, form),
        data_source=text_of({form.source_key: source}, form.source_key, where),
        ground_truth=text,
        label=label,
        extra_info=extra_info,
        indexed=_indexed(text, row, extra_info, where) if _INDEX.fullmatch(text) else "",
    )


def _indexed(truth: str, row: Mapping[str, object], extra_info: Mapping[str, object], where: str) -> str:
    """Return the column of choices of which a number may be the index, from 0 or 1, unless it is also a choice's label,
    or the text of the choice that it would be.
    """
    index = int(truth.removesuffix(".0"))
    for name in _CHOICES:
        choices = read_structure(row.get(name) or extra_info.get(name), f"{where}: {name}")
        if isinstance(choices, Mapping):
            labels = choices.get("label", choices.get("labels", list(choices)))
            choices = choices.get("text", choices.get("texts", list(choices.values())))
            if isinstance(labels, list | tuple) and str(index) in map(str, labels):
                continue
        if isinstance(choices, list | tuple) and index <= len(choices):
            chosen = choices[index : index + 1]
            if choices and [str(each).strip() for each in chosen] != [truth]:
                return name
    return ""


def _with_system(
    row: Mapping[str, object], messages: tuple[Message, ...], where: str, form: DataConfig
) -> tuple[Message, ...]:
    """Put a system turn before a chat that has none: the text of the row's column `system`, or of the settings."""
    given = text_of(row, "system", where) if row.get("system") else None
    if messages[0].role != "system":
        text = form.system_prompt if given is None else given
        return messages if text is None else (Message(role="system", content=text), *messages)
    if given is not None and given.strip() != messages[0].content.strip():
        raise DataError(
            f"{where}: system: got {given!r:.60}, but the chat begins with {messages[0].content!r:.60}; remove one"
        )
    return messages


def _without_nulls(value: object) -> object:
    """Remove the nulls that Parquet puts into structs for fields that other rows have."""
    if isinstance(value, Mapping):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


def demonstration_columns(form: DataConfig, settings: SftConfig) -> tuple[str, ...]:
    """Return the columns that `parse_demonstration` reads, whose names `form` and `settings` can set."""
    chats = CHAT_COLUMNS if settings.chat_key is None else (settings.chat_key,)
    return (*chats, form.prompt_key, *_answer_columns(form, settings), "system", *image_columns(form))


def _answer_columns(form: DataConfig, settings: SftConfig) -> tuple[str, ...]:
    return (form.target_key, *_ANSWER_COLUMNS) if settings.answer_key is None else (settings.answer_key,)


def parse_demonstration(
    row: Mapping[str, object],
    where: str,
    form: DataConfig | None = None,
    settings: SftConfig | None = None,
    images: "RowsImages | None" = None,
) -> DemonstrationRecord:
    """Parse a row of supervised training; DataError names the row (`where`) and what is wrong.

    A row is a chat, in OpenAI's form (`messages` of {role, content}) or ShareGPT's (`conversations` of {from, value}),
    or a prompt with one answer, in `target`, `response` or `completion`. In a chat, all turns of the assistant are
    imitated except those that one of `_SWITCHES` leaves out. A system turn is put before a chat that has none if the
    row has a text in the column `system`, or else if `form.system_prompt` is set. `form` and `settings` may name other
    columns.
    """
    form, settings = form or DataConfig(), settings or SftConfig()
    answers = _answer_columns(form, settings)
    answer = next((name for name in answers if row.get(name)), None)
    if row.get(form.prompt_key) and answer is not None:
        target = read_answer(row, answer, where)
        prompt = read_messages(row, form.prompt_key, where, text_role="user", images=images)
        require_question(prompt, form.prompt_key, where)
        messages = (*prompt, target)
        trained: tuple[int, ...] = (len(messages) - 1,)
    else:
        chats = CHAT_COLUMNS if settings.chat_key is None else (settings.chat_key,)
        name = next((name for name in chats if row.get(name)), None)
        if name is None:
            raise DataError(
                f"{where}: got columns {sorted(key for key, value in row.items() if value)}, expected "
                f"{', '.join(chats)}, or {form.prompt_key} with one of {', '.join(answers)}; sft.chat_key, "
                "data.prompt_key and sft.answer_key name other columns"
            )
        messages, trained = _parse_chat(row, name, where, images)
    num_turns, messages = len(messages), _with_system(row, messages, where, form)
    trained = tuple(i + len(messages) - num_turns for i in trained)
    if not trained or 0 in trained:
        raise DataError(
            f"{where}: the row has roles {[m.role for m in messages]}, expected an answer of the assistant to train "
            "on, after another turn; add what it answers, or remove the row"
        )
    require_words(messages, where)
    if images is not None:
        images.require_all()
    return DemonstrationRecord(messages=messages, trained=trained)


def _parse_chat(
    row: Mapping[str, object], name: str, where: str, images: "RowsImages | None"
) -> tuple[tuple[Message, ...], tuple[int, ...]]:
    """Read a chat in OpenAI's or ShareGPT's form, and the indices of the turns to imitate."""
    chat, turns, left_out = read_turns(row[name], f"{where}: {name}"), list[object](), list[int]()
    for i, turn in enumerate(chat if isinstance(chat, list | tuple) else ()):
        place = f"{where}: {name}[{i}]"
        if isinstance(turn, Mapping):
            switches = {key: turn[key] for key in _SWITCHES if turn.get(key) is not None}
            if wrong := next((key for key, value in switches.items() if value not in (0, 1)), None):
                raise DataError(f"{place}: {wrong} is {turn[wrong]!r}, expected true or false, or 1 or 0")
            left_out += [i] * any(bool(value) is (key == "masked") for key, value in switches.items())
        turns.append(turn)
    messages = read_messages({name: turns or chat}, name, where, images=images)
    return messages, tuple(i for i, message in enumerate(messages) if message.role == "assistant" and i not in left_out)


def preference_columns(form: DataConfig) -> tuple[str, ...]:
    """Return the columns that `parse_preference` reads."""
    return (*PREFERENCE_SIDES, *_question_columns(form), "system", "margin", *image_columns(form))


def _question_columns(form: DataConfig) -> tuple[str, ...]:
    return ("prompt", "messages") if form.prompt_key == "prompt" else (form.prompt_key,)


def parse_preference(
    row: Mapping[str, object], where: str, form: DataConfig | None = None, images: "RowsImages | None" = None
) -> PreferenceRecord:
    """Parse a preference row; DataError names `where` and what is wrong.

    `form` may name the column with the prompt, and give a chat a system turn. images: those that the prompt shows,
    wherever it is written.
    """
    form = form or DataConfig()
    # Each text that has the prompt shows all of them.
    shown = {name: None if images is None else images.again() for name in (*PREFERENCE_SIDES, "prompt")}
    sides = {
        side: read_messages(row, side, where, text_role="assistant", images=shown[side]) for side in PREFERENCE_SIDES
    }
    questions = (name for name in _question_columns(form) if row.get(name))
    prompt = next((read_messages(row, name, where, text_role="user", images=shown["prompt"]) for name in questions), ())
    openings = {side: turns[:-1] for side, turns in sides.items()}
    opening = prompt or openings["chosen"]
    if (asked := shown["prompt" if prompt else "chosen"]) is not None:
        asked.require_all()
    for side, turns in sides.items():
        if turns[-1].role != "assistant" or not turns[-1].content:
            raise DataError(
                f"{where}: {side} ends with {turns[-1].as_dict()!s:.200}, expected an answer of the assistant"
            )
        if openings[side] not in ((), opening) or not opening:
            raise DataError(
                f"{where}: {side} answers {[m.as_dict() for m in openings[side]]!s:.200}, expected the same prompt in "
                f"chosen, rejected and {form.prompt_key} (data.prompt_key), in at least one of these"
            )
    require_question(opening, "the prompt", where)
    require_words(opening, where)
    opening = _with_system(row, opening, where, form)
    if sides["chosen"][-1] == sides["rejected"][-1]:
        raise DataError(f"{where}: chosen and rejected are the same answer, expected two; remove the row")
    margin = row.get("margin")
    if margin is None:
        margin = 0.0
    if isinstance(margin, bool) or not isinstance(margin, int | float) or not abs(margin) < _MAX_MARGIN:
        raise DataError(f"{where}: margin is {margin!r:.50}, expected a finite number, or none")
    return PreferenceRecord(
        chosen=(*opening, sides["chosen"][-1]), rejected=(*opening, sides["rejected"][-1]), margin=float(margin)
    )


def parse_target_probs(row: Mapping[str, object], where: str) -> tuple[float, ...]:
    """Read `target_probs`, in (0, 1] or -1; empty if the row has none. DataError names `where` and what is wrong."""
    value = read_structure(row.get("target_probs"), f"{where}: target_probs")
    if value is None:
        return ()
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise DataError(f"{where}: target_probs is {type(value).__name__}, expected a list of numbers")
    for i, prob in enumerate(value):
        if not isinstance(prob, int | float) or not (0 < prob <= 1 or prob == -1):
            raise DataError(f"{where}: target_probs[{i}] is {prob!r}, expected a number in (0, 1], or -1 if unknown")
    return tuple(map(float, value))


def _mapping(row: Mapping[str, object], name: str, where: str, *, required: bool) -> Mapping[str, object]:
    value = row.get(name)
    value = read_structure(value, f"{where}: {name}") if isinstance(value, str) else value
    if value is None and not required:
        return {}
    if not isinstance(value, Mapping):
        got = f"the text {value!r:.60}" if isinstance(value, str) else type(value).__name__
        raise DataError(f"{where}: {name} is {got}, expected an object, or JSON of one")
    # Parquet gives every row all fields of a struct, as nulls where a row had none.
    return {key: item for key, item in value.items() if item is not None}
