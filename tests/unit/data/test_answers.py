"""Answers have the tokens of one rendering of the whole chat, whatever the tokenizer and the template."""

import re
from functools import cache
from itertools import groupby
from operator import itemgetter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerBase

from megarl.data.answers import Answers, response_decoder
from megarl.data.chat import encode_chats
from megarl.data.turns import InterTurnTokens
from megarl.errors import DataError
from megarl.types import Message
from megarl_lab.recipes.tiny_model import make_byte_tokenizer
from tests.helpers.tokenizers import ALPHABET, KINDS, make_tokenizer

# How the prompt ends where the answer begins: after a line, after a mark, with the answer's own space, within a text.
ZEPHYR = (
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
PHI = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
MISTRAL = (
    "<s>{% for m in messages %}{% if m.role == 'user' %}(user) {{ m.content }} (so){% else %} {{ m.content }}</s>"
    "{% endif %}{% endfor %}"
)
VICUNA = (
    "{% for m in messages %}{% if m.role == 'user' %}user: {{ m.content }} assistant:{% else %} {{ m.content }}</s>"
    "{% endif %}{% endfor %}"
)
TEMPLATES = {"Zephyr": ZEPHYR, "Phi": PHI, "Mistral": MISTRAL, "Vicuna": VICUNA}
QUESTION = Message(role="user", content="What is 1 + 2?")
TEXTS = st.text(alphabet=ALPHABET, min_size=1, max_size=30)


@cache
def opened(kind: str, template: str) -> tuple[PreTrainedTokenizerBase, Answers]:
    tokenizer = make_tokenizer(kind, TEMPLATES[template])
    return tokenizer, Answers(tokenizer)


def answered(text: str) -> Message:
    return Message(role="assistant", content=text)


def ids_of(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


def whole_chat(tokenizer: PreTrainedTokenizerBase, *texts: str) -> str:
    """The chat as the template renders it, up to the end of its last answer."""
    roles = ("user", "assistant") * len(texts)
    chat = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]
    return str(tokenizer.apply_chat_template(chat, tokenize=False)).rstrip("\n")


@pytest.mark.parametrize("kind", KINDS)
def test_ids_are_those_of_one_rendering(kind: str) -> None:
    @settings(max_examples=6, derandomize=True, deadline=None, database=None)
    @given(name=st.sampled_from(sorted(TEMPLATES)), first=TEXTS, question=TEXTS, second=TEXTS)
    def check(name: str, first: str, question: str, second: str) -> None:
        tokenizer, answers = opened(kind, name)
        # Where an answer begins with a space, it may merge with the prompt: the next test.
        first, second = f"T{first}", f"({second}"
        prompt = encode_chats(tokenizer, [[QUESTION]])[0]
        one = whole_chat(tokenizer, QUESTION.content, first)
        assert prompt + answers.demonstration([QUESTION], first) == ids_of(tokenizer, one)
        text = whole_chat(tokenizer, QUESTION.content, first, question, second)
        chat = [QUESTION, answered(first), Message(role="user", content=question), answered(second)]
        ids, mask = answers.turns(chat, (1, 3), where="row")
        assert ids == ids_of(tokenizer, text)
        assert ids[: mask.index(True)] == prompt
        runs = ([i for i, _ in run] for trains, run in groupby(zip(ids, mask, strict=True), itemgetter(1)) if trains)
        end = "<|end|>" if name == "Phi" else "</s>"
        for run, answer in zip(runs, (first, second), strict=True):
            assert "".join(tokenizer.decode(run).split()) == "".join(f"{answer}{end}".split())

    check()


@pytest.mark.parametrize("kind", KINDS)
def test_an_answer_that_merges_with_the_prompt_leaves_the_prompts_tokens(kind: str) -> None:
    @settings(max_examples=6, derandomize=True, deadline=None, database=None)
    @given(name=st.sampled_from(sorted(TEMPLATES)), target=TEXTS.filter(str.strip))
    def check(name: str, target: str) -> None:
        tokenizer, answers = opened(kind, name)
        prompt = encode_chats(tokenizer, [[QUESTION]])[0]
        whole = ids_of(tokenizer, whole_chat(tokenizer, QUESTION.content, target))
        ids = answers.demonstration([QUESTION], target)
        assert tokenizer.decode(prompt + ids) == tokenizer.decode(whole)
        assert ids[-1] == answers.stop_tokens.token_ids[0]
        if whole[: len(prompt)] == prompt:
            assert prompt + ids == whole

    check()


def test_a_prompt_that_ends_within_a_token_is_a_warning() -> None:
    """Engines are given the prompt's last space as a token, which no text that is tokenised at once has there."""
    spaced = VICUNA.replace(" assistant:{% else %} {{", " assistant: {% else %}{{")
    tokenizer = make_tokenizer("byte-level", spaced)
    (warning,) = Answers(tokenizer).warnings()
    assert re.match(
        r"model\.path: the chat template's prompt ends within a token: before 'The answer is 1\.' engines are given "
        r"\['\u0120'\], and \['The'\] follows, but in the whole chat both are \['\u0120The'\]",
        warning,
    )
    prompt = encode_chats(tokenizer, [[QUESTION]])[0]
    ids = Answers(tokenizer).demonstration([QUESTION], "The answer")
    assert tokenizer.decode(prompt + ids) == "user: What is 1 + 2? assistant: The answer</s>"
    for name in ("Zephyr", "Mistral", "Vicuna"):
        assert list(opened("byte-level", name)[1].warnings()) == []


# --- ends


def test_one_end_for_all_that_trains() -> None:
    """As Qwen2.5's base models: files name <|endoftext|> (0), the template ends turns with <|im_end|> (2)."""
    tokenizer = make_byte_tokenizer()
    tokenizer.eos_token = "<|endoftext|>"
    answers = Answers(tokenizer, declared=(0,))
    chat = [QUESTION, answered("2"), QUESTION, answered("3")]
    two, three = (ord(digit) - 30 for digit in "23")
    assert answers.demonstration([QUESTION], "2") == [two, 2]
    # What an author's script has appended.
    assert answers.demonstration([QUESTION], "2<|endoftext|>") == [two, 2]
    assert answers.demonstration([QUESTION], "2<|im_end|>") == [two, 2]
    ids, mask = answers.turns(chat, (1, 3), where="row")
    assert [token for token, trains in zip(ids, mask, strict=True) if trains] == [two, 2, three, 2]
    assert ids == ids_of(tokenizer, whole_chat(tokenizer, *(message.content for message in chat)))
    with pytest.raises(DataError, match=r"row 3: the target is .* expected text with '<\|endoftext\|>' nowhere but"):
        answers.demonstration([QUESTION], "2<|endoftext|>3", where="row 3")
    assert answers.stop_tokens.stop_token_ids == (2, 0)
    (warning,) = answers.warnings()
    assert re.match(r"model\.path: answers end with '<\|im_end\|>', .* other files name '<\|endoftext\|>'; ", warning)


def test_the_next_speakers_mark_that_ends_an_answer_is_that_of_the_chat() -> None:
    """As in GLM: after an answer that a tool follows, the policy writes <|observation|>."""
    tokenizer = make_byte_tokenizer()
    tokenizer.add_tokens([AddedToken(f"<|{name}|>", special=True) for name in ("user", "observation", "assistant")])
    user, observation = tokenizer.convert_tokens_to_ids(["<|user|>", "<|observation|>"])
    tokenizer.chat_template = (
        "{% for m in messages %}<|{{ 'observation' if m.role == 'tool' else m.role }}|>\n{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
    )
    answers = Answers(tokenizer, declared=(0, user, observation))
    chat = [QUESTION, answered("a"), Message(role="tool", content="t"), answered("b"), QUESTION]
    ids, mask = answers.turns(chat, (1, 3), where="row")
    trained = [token for token, trains in zip(ids, mask, strict=True) if trains]
    assert trained == [ord("a") - 30, observation, ord("b") - 30, user]
    assert answers.turns(chat, (1,), where="row")[0][-1] == observation
    assert answers.demonstration([QUESTION], "a")[-1] == user


def test_scorers_do_not_see_an_end_that_is_no_special_token() -> None:
    tokenizer = make_byte_tokenizer()
    tokenizer.add_tokens([AddedToken("<|end|>", special=False, normalized=False)])
    tokenizer.chat_template = PHI
    assert response_decoder(tokenizer)(Answers(tokenizer).demonstration([QUESTION], "42")) == "42"


def test_a_conversation_goes_on_after_the_end_of_a_last_answer() -> None:
    """As in gpt-oss: the last answer of a chat ends with another mark than those before it; one of both is enough."""
    tokenizer = make_byte_tokenizer()
    tokenizer.add_tokens([AddedToken(mark, special=True) for mark in ("<|end|>", "<|return|>")])
    end, last = tokenizer.convert_tokens_to_ids(["<|end|>", "<|return|>"])
    tokenizer.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
        "{{ '<|return|>' if loop.last and m.role == 'assistant' else '<|end|>' }}{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    assert Answers(tokenizer).demonstration([QUESTION], "2")[-1] == last
    inter_turn = InterTurnTokens(tokenizer)
    following = inter_turn.between([QUESTION], last_token=end)
    assert following == ids_of(tokenizer, f"<|im_start|>user\n{QUESTION.content}<|end|><|im_start|>assistant\n")
    assert inter_turn.between([QUESTION], last_token=last) == following
    assert inter_turn.between([QUESTION], last_token=40) == [end, *following]


@pytest.mark.parametrize("kind", [*KINDS][::3])
@pytest.mark.parametrize("spans", [("[THINK]", "[/THINK]"), ("<|box|>", "<|end_of_box|>")])
def test_special_tokens_that_the_policy_writes_are_words(kind: str, spans: tuple[str, str]) -> None:
    """Whatever a template says of thoughts. Its own marks are no words, nor are the tokens at which engines stop."""
    first, last = spans
    thinks = "<s>{% if not add_generation_prompt %}" + first + last + "{% endif %}"
    tokenizer = make_tokenizer(kind, (thinks if "/" in last else "") + PHI)
    marks = [AddedToken(mark, special=True, normalized=False) for mark in (*spans, "<|eom|>")]
    tokenizer.add_special_tokens({"additional_special_tokens": marks})
    decode, text = response_decoder(tokenizer), f"{first}1{last}2{last}3"
    said = decode(ids_of(tokenizer, text))
    assert "".join(said.split()) == text
    ends = [ids_of(tokenizer, end)[-1] for end in ("<|end|>", "<|user|>", "<|eom|>")]
    assert [decode([*ids_of(tokenizer, text), end]) for end in ends] == [said] * 3
    # A thought that was cut after its end, and one that begins a turn of its own.
    assert decode(ids_of(tokenizer, f"1{last}")).endswith(last) is ("/" in last)
    assert "".join(decode(ids_of(tokenizer, f"1<|end|><|assistant|>{text}")).split()) == f"1{text}"


def test_a_date_in_prompts_is_said() -> None:
    """As in Llama 3.2: unless its argument is set, the template asks for the day's date."""
    tokenizer = make_byte_tokenizer()
    plain = str(tokenizer.chat_template)
    named = "{% set day = day or strftime_now('%d %b %Y') %}{{ day }}" + plain
    for template, warned in ((named, True), ("{% set day = '1 Jan 2026' %}" + named, False), (plain, False)):
        tokenizer.chat_template = template
        assert any("writes the day's date into prompts" in each for each in Answers(tokenizer).warnings()) is warned
