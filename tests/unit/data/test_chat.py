"""Chat templates, with ids worked out by hand.

The byte tokenizer numbers <|endoftext|> 0, <|im_start|> 1, <|im_end|> 2, then the 256 byte symbols, sorted by
code point, from 3: `!` (33) is the first, so printable ASCII character c is ord(c) − 30. A line feed is byte 10;
its symbol U+010A comes after 94 + 12 + 82 = 188 printable ones and ten control characters: 3 + 188 + 10 = 201.
The words user, assistant, "Hint: ", <answer>, </answer> are 259 to 263.
"""

import re
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from megarl.data.answers import Answers, response_decoder
from megarl.data.chat import (
    TemplateRefusal,
    encode_chats,
    load_tokenizer,
    long_prompt_error,
    render_chats,
    token_texts,
)
from megarl.data.records import Message
from megarl.data.vocabulary import check_vocabulary
from megarl.errors import ConfigError, DataError
from megarl_lab.recipes.tiny_model import make_byte_tokenizer

DATED = (
    "\n  {% macro today() %}On {{ date_string }}{% endmacro %}{% if not date_string is defined %}"
    "{% set date_string = '26 Jul 2024' %}{% endif %}{{ today() }}: {% generation %}{{ messages[0].content }}"
    "{% endgeneration %}{{ eos_token }}"
)


QUESTION = (Message(role="user", content="1+1=?"),)
LINE_FEED = 201

DIGIT_1, PLUS, EQUALS, QUESTION_MARK = ord("1") - 30, ord("+") - 30, ord("=") - 30, ord("?") - 30
QUESTION_IDS = [
    *(1, 259, LINE_FEED),
    *(DIGIT_1, PLUS, DIGIT_1, EQUALS, QUESTION_MARK, 2, LINE_FEED),
    *(1, 260, LINE_FEED),
]


def test_prompt_ends_where_the_assistant_speaks(tokenizer: PreTrainedTokenizerBase) -> None:
    assert encode_chats(tokenizer, [QUESTION])[0] == QUESTION_IDS
    other = (Message(role="user", content="1"),)
    assert encode_chats(tokenizer, [QUESTION, other])[0] == QUESTION_IDS
    assert encode_chats(tokenizer, [other]) == [[1, 259, LINE_FEED, DIGIT_1, 2, LINE_FEED, 1, 260, LINE_FEED]]


def test_decoder_drops_special_tokens_and_keeps_words(tokenizer: PreTrainedTokenizerBase) -> None:
    decode = response_decoder(tokenizer)
    assert decode([262, DIGIT_1, PLUS, DIGIT_1, 263, 2, 0]) == "<answer>1+1</answer>"
    # "1 , 2" must not become "1, 2".
    assert decode(Answers(tokenizer).demonstration(QUESTION, "1 , 2")) == "1 , 2"
    assert decode([]) == ""


def test_models_of_one_run_have_one_vocabulary(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    """A critic needs no chat template, but the same ids."""
    other = make_byte_tokenizer()
    other.chat_template = None
    other.save_pretrained(tmp_path / "same")
    check_vocabulary(tokenizer, str(tmp_path / "same"), "critic.model_path")
    other.add_tokens(["Zebra"])
    other.save_pretrained(tmp_path / "other")
    message = (
        r"^reference\.model_path: the tokenizer in .*/other differs from that of model\.path in 1 tokens, such as "
        r"'Zebra'; use a model with the same tokenizer$"
    )
    with pytest.raises(ConfigError, match=message):
        check_vocabulary(tokenizer, str(tmp_path / "other"), "reference.model_path")
    with pytest.raises(ConfigError, match=r"^critic\.model_path: .*/none has no tokenizer_config\.json"):
        check_vocabulary(tokenizer, str(tmp_path / "none"), "critic.model_path")


def test_tokenizers_that_cannot_chat(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no tokenizer_config\.json; expected a model directory"):
        load_tokenizer(tmp_path)
    tokenizer = make_byte_tokenizer()
    tokenizer.eos_token = None
    tokenizer.save_pretrained(tmp_path / "no_eos")
    with pytest.raises(ConfigError, match="has no eos_token"):
        load_tokenizer(tmp_path / "no_eos")
    tokenizer.chat_template = None
    tokenizer.save_pretrained(tmp_path / "no_template")
    with pytest.raises(ConfigError, match="has no chat template"):
        load_tokenizer(tmp_path / "no_template")


# --- arguments of the chat template

TURNS = (
    "{%- macro turn(role, text) -%}<|im_start|>{{ role }}\n{{ text }}<|im_end|>\n{%- endmacro -%}"
    "{%- for m in messages %}{{ turn(m.role, m.content) }}\n{% endfor %}"
)
# The end of Qwen3's template.
QWEN3 = TURNS + (
    "{%- if add_generation_prompt %}\n    {{- '<|im_start|>assistant\\n' }}\n"
    "    {%- if enable_thinking is defined and enable_thinking is false %}\n"
    "        {{- '<think>\\n\\n</think>\\n\\n' }}\n    {%- endif %}\n{%- endif %}"
)


def rendered(directory: Path, template: str, **arguments: Any) -> str:
    """What a chat with one question becomes after a tokenizer with the template was saved and loaded."""
    tokenizer = make_byte_tokenizer()
    tokenizer.chat_template = template
    tokenizer.save_pretrained(directory)
    loaded = load_tokenizer(directory, arguments=arguments)
    text: str = loaded.apply_chat_template([m.as_dict() for m in QUESTION], tokenize=False, add_generation_prompt=True)
    assert loaded.decode(encode_chats(loaded, [QUESTION])[0]) == text
    return text


@pytest.mark.parametrize(
    ("arguments", "opening"),
    [({}, ""), ({"enable_thinking": False}, "<think>\n\n</think>\n\n")],
)
def test_arguments_are_part_of_the_template(tmp_path: Path, arguments: dict[str, Any], opening: str) -> None:
    chat = "<|im_start|>user\n1+1=?<|im_end|>\n<|im_start|>assistant\n"
    assert rendered(tmp_path, QWEN3, **arguments) == chat + opening


def test_an_argument_adds_nothing_else(tmp_path: Path) -> None:
    """The template's own white space stays, with arguments and without."""
    end = ": 1+1=?<|im_end|>"
    assert rendered(tmp_path, DATED).replace("26 Jul 2024", "Monday").endswith(end)
    assert rendered(tmp_path, DATED, date_string="Monday") == rendered(tmp_path, DATED).replace("26 Jul 2024", "Monday")


@pytest.mark.parametrize(
    ("value", "written"),
    [
        ('it\'s %} "quoted" \\ and\nädd', '"it\'s %} \\"quoted\\" \\\\ and\\nädd"'),
        ({"a": [1, -2.5, None, True]}, '{"a": [1, -2.5, null, true]}'),
        (1e-07, "1e-07"),
    ],
)
def test_arguments_of_every_json_type(tmp_path: Path, value: Any, written: str) -> None:
    assert rendered(tmp_path, "{{ x | tojson }}{{ messages[0].content }}", x=value) == written + "1+1=?"


@pytest.mark.parametrize("written", ["{{ m.content }}", "{{ m.content | trim }}"], ids=["as it is", "stripped"])
@pytest.mark.parametrize("thought", ["", "<think>\n"], ids=["plain", "opened"])
@pytest.mark.parametrize("inserted", ["", "<think>\n\n</think>\n\n"], ids=["plain", "inserted"])
def test_a_prefill_is_continued_as_the_policy_would_have_begun(written: str, thought: str, inserted: str) -> None:
    """Whether the template strips answers, opens a thought, or writes an empty one before a last answer."""
    tokenizer = make_byte_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if loop.last and m.role == 'assistant' %}"
        f"{{{{ {inserted!r} }}}}{{% endif %}}{written}<|im_end|>\n{{% endfor %}}"
        f"{{% if add_generation_prompt %}}<|im_start|>assistant\n{{{{ {thought!r} }}}}{{% endif %}}"
    )
    opening = "<|im_start|>user\n1+1=?<|im_end|>\n<|im_start|>assistant\n"
    for text in ("x = ", " x", "Step 1.\n\n", "\n", "", "1+1", "<think>\nSo "):
        chat = [*QUESTION, Message(role="assistant", content=text)]
        assert render_chats(tokenizer, [chat], prefill=True) == [opening + thought + text.removeprefix(thought)]
    tokenizer.chat_template += "{% if add_generation_prompt %}<think></think>{% endif %}"
    with pytest.raises(TemplateRefusal, match=r"ends with .*</think>', a thought that is closed, and the last turn th"):
        render_chats(tokenizer, [[*QUESTION, Message(role="assistant", content="<think>x")]], prefill=True)


def test_arguments_that_the_template_never_reads(tmp_path: Path) -> None:
    message = r"^data\.chat_template\.thinking: the chat template in .* never reads this; it may read enable_thinking$"
    with pytest.raises(ConfigError, match=message):
        rendered(tmp_path, QWEN3, thinking=False)
    with pytest.raises(ConfigError, match=r"it may read date_string$"):
        rendered(tmp_path, DATED, messages=[])
    with pytest.raises(ConfigError, match=r"chat_template\.enable_thinking: .* it reads no arguments$"):
        rendered(tmp_path, TURNS, enable_thinking=False)
    with pytest.raises(ConfigError, match="is not valid Jinja: "):
        rendered(tmp_path, "{% if %}", x=1)


def test_long_prompt_names_row_and_both_numbers(tokenizer: PreTrainedTokenizerBase) -> None:
    message = r"row 5: the prompt has 13 tokens, data.max_prompt_tokens is 12"
    assert re.match(message, str(long_prompt_error("row 5", len(encode_chats(tokenizer, [QUESTION])[0]), 12)))


def test_demonstration_ends_in_eos_once(tokenizer: PreTrainedTokenizerBase) -> None:
    expected = [DIGIT_1, 2]
    assert Answers(tokenizer).demonstration(QUESTION, "1") == expected
    assert Answers(tokenizer).demonstration(QUESTION, "1<|im_end|>") == expected
    for target in ("1<|im_end|>1", "1<|im_end|><|im_end|>", "<|im_end|>", ""):
        with pytest.raises(DataError, match=r"row 3: the target is .* nowhere but at its end"):
            Answers(tokenizer).demonstration(QUESTION, target, where="row 3")


def test_texts_of_tokens_join_to_the_whole() -> None:
    """Of the bytes of a character only the last one adds text; what ends within one is shown by the last token."""
    tokenizer = make_byte_tokenizer()
    ids = tokenizer("a é€b", add_special_tokens=False)["input_ids"]
    assert token_texts(tokenizer, ids) == ["a", " ", "", "é", "", "", "€", "b"]
    assert token_texts(tokenizer, ids[:6])[:4] == ["a", " ", "", "é"]
    assert "".join(token_texts(tokenizer, ids[:6])) == "a é\ufffd"
    assert token_texts(tokenizer, []) == []
