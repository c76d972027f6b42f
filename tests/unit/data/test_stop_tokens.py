"""The token that ends an answer, for templates and declared ends of many model families."""

import json
from dataclasses import dataclass
from pathlib import Path

import pytest
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerBase

from megarl.config.generation import RolloutConfig
from megarl.config.models import ModelConfig
from megarl.data.answers import Answers
from megarl.data.stop_tokens import StopTokens, answer_form, declared_stop_tokens, stop_tokens_of
from megarl.errors import ConfigError
from megarl_lab.recipes.tiny_model import make_byte_tokenizer

ASSISTANT = "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"


@dataclass(frozen=True, kw_only=True)
class Family:
    """How a family writes chats, which tokens its files name, and, by hand, the ends that follow.

    tail: what is written after an answer, if that is more than its end.
    """

    template: str
    eos: str
    declared: tuple[str, ...] = ()
    end: str
    stops: tuple[str, ...]
    tail: str | None = None


CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA3 = (
    "<|begin_of_text|>{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
    "{{ m.content | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
# No mark after an answer but that of the next speaker.
UNMARKED = "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{% endfor %}" + ASSISTANT
FAMILIES = {
    "Qwen2.5 base": Family(
        template=CHATML,
        eos="<|endoftext|>",
        declared=("<|endoftext|>",),
        end="<|im_end|>",
        stops=("<|im_end|>", "<|endoftext|>"),
    ),
    "Qwen2.5 instruct": Family(
        template=CHATML,
        eos="<|im_end|>",
        declared=("<|im_end|>", "<|endoftext|>"),
        end="<|im_end|>",
        stops=("<|im_end|>", "<|endoftext|>"),
    ),
    "Qwen3, which writes an empty thought": Family(
        template=CHATML.replace("\n{{ m.content", "\n{{ '<think>\n\n</think>\n\n' if loop.last }}{{ m.content"),
        eos="<|im_end|>",
        end="<|im_end|>",
        stops=("<|im_end|>",),
    ),
    "Llama 3 with a base model's tokenizer": Family(
        template=LLAMA3,
        eos="<|end_of_text|>",
        declared=("<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"),
        end="<|eot_id|>",
        stops=("<|eot_id|>", "<|end_of_text|>", "<|eom_id|>"),
    ),
    "Gemma": Family(
        template="<bos>{% for m in messages %}<start_of_turn>{{ m.role }}\n{{ m.content | trim }}<end_of_turn>\n"
        "{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}",
        eos="<eos>",
        declared=("<eos>",),
        end="<end_of_turn>",
        stops=("<end_of_turn>", "<eos>"),
    ),
    "Mistral": Family(
        template="<s>{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
        "{% elif m.role == 'assistant' %} {{ m.content }}</s>{% else %}{{ raise_exception('roles') }}{% endif %}"
        "{% endfor %}",
        eos="</s>",
        declared=("</s>",),
        end="</s>",
        stops=("</s>",),
    ),
    "Llama 2, which writes a space before the end": Family(
        template="{% for m in messages %}{% if m.role == 'user' %}<s>[INST] {{ m.content }} [/INST]"
        "{% else %} {{ m.content }} </s>{% endif %}{% endfor %}",
        eos="</s>",
        end="</s>",
        tail=" </s>",
        stops=("</s>",),
    ),
    "Phi 3, which writes the eos token at the end of a chat": Family(
        template="{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>\n{% else %}{{ eos_token }}{% endif %}",
        eos="<|endoftext|>",
        declared=("<|endoftext|>", "<|end|>", "<|assistant|>"),
        end="<|end|>",
        stops=("<|end|>", "<|endoftext|>", "<|assistant|>"),
    ),
    "DeepSeek": Family(
        template="{% for m in messages %}{% if m.role == 'user' %}<|User|>{{ m.content }}{% else %}"
        "<|Assistant|>{{ m.content }}<\uff5cend\u2581of\u2581sentence\uff5c>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|Assistant|><think>\n{% endif %}",
        eos="<\uff5cend\u2581of\u2581sentence\uff5c>",
        end="<\uff5cend\u2581of\u2581sentence\uff5c>",
        stops=("<\uff5cend\u2581of\u2581sentence\uff5c>",),
    ),
    "a chat that must begin with a system turn": Family(
        template="{% if messages[0].role != 'system' %}{{ raise_exception('system first') }}{% endif %}" + CHATML,
        eos="<|endoftext|>",
        end="<|im_end|>",
        stops=("<|im_end|>", "<|endoftext|>"),
    ),
    "GLM 4": Family(
        template="[gMASK]<sop>" + UNMARKED,
        eos="<|endoftext|>",
        declared=("<|endoftext|>", "<|user|>", "<|observation|>"),
        end="<|user|>",
        stops=("<|user|>", "<|endoftext|>", "<|observation|>"),
    ),
    "Baichuan, whose next speaker's mark is no end": Family(
        template=UNMARKED, eos="</s>", declared=("</s>",), end="</s>", stops=("</s>",)
    ),
    "plain text": Family(
        template="{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant:{% endif %}",
        eos="<|endoftext|>",
        end="<|endoftext|>",
        stops=("<|endoftext|>",),
    ),
    "plain text with a prompt that nobody asked for": Family(
        template="{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:",
        eos="<|endoftext|>",
        end="<|endoftext|>",
        stops=("<|endoftext|>",),
    ),
    "marks of speakers with a prompt that nobody asked for": Family(
        template=UNMARKED.replace("{% if add_generation_prompt %}", "{% if true %}"),
        eos="</s>",
        end="</s>",
        stops=("</s>",),
    ),
    "ChatML with a prompt that nobody asked for": Family(
        template=CHATML.replace("{% if add_generation_prompt %}", "{% if true %}"),
        eos="<|endoftext|>",
        end="<|im_end|>",
        stops=("<|im_end|>", "<|endoftext|>"),
    ),
    "a template of questions alone": Family(
        template="{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}\n{% endif %}{% endfor %}",
        eos="<|endoftext|>",
        end="<|endoftext|>",
        stops=("<|endoftext|>",),
    ),
}


def tokenizer_of(family: Family) -> PreTrainedTokenizerBase:
    tokenizer = make_byte_tokenizer()
    marks = (family.eos, family.end, "<|user|>", "<|assistant|>", *family.declared, *family.stops)
    tokenizer.add_tokens([AddedToken(mark, special=True, normalized=False) for mark in dict.fromkeys(marks)])
    tokenizer.eos_token = family.eos
    tokenizer.chat_template = family.template
    return tokenizer


@pytest.mark.parametrize("name", FAMILIES)
def test_the_end_of_a_family(name: str) -> None:
    family = FAMILIES[name]
    tokenizer = tokenizer_of(family)
    declared = tokenizer.convert_tokens_to_ids(list(family.declared))
    ends = stop_tokens_of(tokenizer, answer_form(tokenizer), declared=declared)
    assert ends.token_ids == (tokenizer.convert_tokens_to_ids(family.end),)
    assert ends.tails[0] == (family.tail or family.end)
    assert tuple(tokenizer.convert_ids_to_tokens(list(ends.stop_token_ids))) == family.stops
    assert ends.names == family.stops


def by_template(template: str, **settings: tuple[str, ...] | tuple[int, ...]) -> StopTokens:
    tokenizer = make_byte_tokenizer()
    tokenizer.chat_template = template
    return stop_tokens_of(tokenizer, answer_form(tokenizer), **settings)  # type: ignore[arg-type]


def test_an_end_that_is_no_token_needs_a_setting() -> None:
    """A ChatML template beside a tokenizer that never heard of it."""
    template = CHATML.replace("<|im_end|>", "<|done|>")
    message = (
        r"^model\.path: the chat template ends an answer with '<\|done\|>', which is not a token of the tokenizer, so "
        r"that engines do not stop there; set rollout\.stop to \['<\|done\|>'\], or let the template write a token "
        r"such as '<\|im_end\|>'$"
    )
    with pytest.raises(ConfigError, match=message):
        by_template(template)
    with pytest.raises(ConfigError, match=message):
        by_template(template, stop=("</answer>",), stop_token_ids=(7,))
    ends = by_template(template, stop=("</answer>", "<|done|>"), stop_token_ids=(7,))
    # Printable ASCII characters are numbered from 3 on.
    assert ends.token_ids == tuple(ord(c) - 30 for c in "<|done|>")
    assert (ends.tails, ends.declared, ends.stop_token_ids) == (("<|done|>",), (2,), (2, 7))
    assert ends.names == ("</answer>", "<|done|>", "<|im_end|>", "%")
    assert ends.are_at_end_of([5, *ends.token_ids])
    assert not ends.are_at_end_of([*ends.token_ids, 5])
    assert not ends.are_at_end_of([])


def test_what_the_user_sets_ends_responses_too() -> None:
    ends = by_template(CHATML, stop_token_ids=(7, 2))
    assert (ends.token_ids, ends.declared, ends.stop_token_ids) == ((2,), (2,), (2, 7))
    # A next speaker's mark that no file declares.
    tokenizer = tokenizer_of(FAMILIES["GLM 4"])
    user = tokenizer.convert_tokens_to_ids("<|user|>")
    assert stop_tokens_of(tokenizer, answer_form(tokenizer), stop_token_ids=(user,)).token_ids == (user,)


def test_an_end_beyond_the_vocabulary_is_kept() -> None:
    """Some configurations name tokens that their tokenizer lacks; engines cannot write them either."""
    assert by_template(CHATML, declared=(151645,)).names == ("<|im_end|>", "token 151645")


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, ()),
        # The tokenizer has fewer than 1,000 tokens.
        ({"config.json": {"eos_token_id": 1005}}, (1005,)),
        ({"config.json": {"eos_token_id": 1006}, "generation_config.json": {"eos_token_id": [1006, 0]}}, (1006, 0)),
        ({"config.json": {"eos_token_id": 1005}, "generation_config.json": {"eos_token_id": 1006}}, (1006, 1005)),
        ({"config.json": {"eos_token_id": 1005}, "generation_config.json": {}}, (1005,)),
        ({"config.json": {"eos_token_id": None}}, ()),
    ],
)
def test_engines_stop_at_the_ends_of_both_files(
    files: dict[str, dict[str, object]], expected: tuple[int, ...], tmp_path: Path
) -> None:
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    (tmp_path / "tokenizer_config.json").touch()
    rollout = RolloutConfig(stop_token_ids=(9,))
    answers = Answers.of(ModelConfig(path=str(tmp_path)), rollout, make_byte_tokenizer())
    assert answers.stop_tokens.stop_token_ids == (2, *expected, 9)


def test_an_end_that_is_a_piece_of_text_is_refused() -> None:
    """A configuration's end is that of another tokenizer: engines would stop at each such piece, without a word."""
    (hash_sign,) = make_byte_tokenizer()("#", add_special_tokens=False)["input_ids"]
    with pytest.raises(ConfigError, match=r"eos_token_id .* is \d+, which stands for the text '#' in this tokenizer"):
        by_template(CHATML, declared=(2, hash_sign))


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 6')
    with pytest.raises(ConfigError, match=r"^.*/generation_config\.json: not JSON: .*; copy the model again$"):
        declared_stop_tokens(tmp_path)


@pytest.mark.parametrize("declared", ["</s>", ["<|im_end|>"], [[1]], True, 1.0, -1, {"a": 1}, [1, None], 2**40])
def test_ends_that_are_no_numbers_of_tokens_are_refused(declared: object, tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": declared}))
    with pytest.raises(ConfigError, match=r"^.*/generation_config\.json: eos_token_id is .*, expected the number of a"):
        declared_stop_tokens(tmp_path)


def test_a_template_that_leaves_out_questions_is_refused() -> None:
    """SmolVLM's template, for example, looks for the parts of a turn and finds none in a text."""
    template = (
        "{% for m in messages %}{{ m.role }}: {% for part in m.content %}{% if part['type'] == 'text' %}"
        "{{ part['text'] }}{% endif %}{% endfor %}<|im_end|>\n{% endfor %}"
    )
    with pytest.raises(
        ConfigError, match=r"^model\.path: the chat template leaves out a user's words and writes .user: "
    ):
        by_template(template)


def test_what_a_template_inserts_before_an_answer_is_said() -> None:
    """Qwen3's template writes an empty thought into whole chats alone."""
    tokenizer = tokenizer_of(FAMILIES["Qwen2.5 instruct"])
    thought = "\n{{ '<think>\n\n</think>\n\n' if m.role == 'assistant' }}{{ m.content"
    tokenizer.chat_template = CHATML.replace("\n{{ m.content", thought)
    (warning,) = Answers(tokenizer).warnings()
    assert r"the chat template writes '<think>\n\n</think>\n\n' in whole chats" in warning
    assert list(Answers(tokenizer).warnings(of_data=False)) == []
    assert list(Answers(tokenizer_of(FAMILIES["Qwen2.5 instruct"]), declared=(2,)).warnings()) == []
