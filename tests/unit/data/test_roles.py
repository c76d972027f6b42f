"""Every turn of a data set reaches the model: sequences of roles under templates in the manner of published ones."""

from dataclasses import replace
from itertools import product
from random import Random

import pytest
from transformers import PreTrainedTokenizerBase

from megarl.data.answers import Answers
from megarl.data.chat import render_chats
from megarl.data.roles import RoleCheck
from megarl.data.special_tokens import SpelledSpecialTokens
from megarl.errors import DataError
from megarl.types import Message

REFUSAL = "{{ raise_exception('roles must alternate') }}"


def looped(body: str, prompt: str) -> str:
    return f"{{% for m in messages %}}{body}{{% endfor %}}{{% if add_generation_prompt %}}{prompt}{{% endif %}}"


def by_role(turns: dict[str, str], prompt: str, otherwise: str = "") -> str:
    cases = "".join(f"{{% if m.role == '{role}' %}}{text}{{% endif %}}" for role, text in turns.items())
    other = f"{{% if m.role not in {list(turns)} %}}{otherwise}{{% endif %}}" if otherwise else ""
    return looped(cases + other, prompt)


IM = "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
UNTHOUGHT = "<|im_start|>assistant\n{{ m.content.split('</think>')[-1].strip() }}<|im_end|>\n"
IM_PROMPT = "<|im_start|>assistant\n"
# A template, and the roles whose turns it writes; a turn of another role is left out or refused.
TEMPLATES = {
    "chatml": (looped(IM, IM_PROMPT), None),
    "chatml of three roles": (by_role(dict.fromkeys(("system", "user", "assistant"), IM), IM_PROMPT), "sua"),
    "llama 2": (
        "{%- set ns = namespace(system='') -%}{%- for m in messages -%}{%- if m.role == 'system' -%}"
        "{%- set ns.system = '<<SYS>>\n' + m.content + '\n<</SYS>>\n\n' -%}{%- elif m.role == 'user' -%}"
        "[INST] {{ ns.system + m.content }} [/INST]{%- set ns.system = '' -%}{%- elif m.role == 'assistant' -%}"
        " {{ m.content.strip() }} <|im_end|>{%- endif -%}{%- endfor -%}",
        "sua",
    ),
    "gemma": (
        by_role(
            {
                "user": "<start>user\n{{ m.content | trim }}<|im_end|>\n",
                "assistant": "<start>model\n{{ m.content | trim }}<|im_end|>\n",
            },
            "<start>model\n",
            REFUSAL,
        ),
        "ua",
    ),
    "mistral, system turns before the last question": (
        "{%- set ns = namespace(system='') -%}{%- for m in messages -%}{%- if m.role == 'system' -%}"
        "{%- set ns.system = m.content + '\n\n' -%}{%- elif m.role == 'user' -%}"
        "[INST] {{ ns.system if loop.last }}{{ m.content }}[/INST]{%- elif m.role == 'assistant' -%}"
        " {{ m.content }}<|im_end|>{%- endif -%}{%- endfor -%}",
        "sua",
    ),
    "qwen 3": (
        by_role(
            {"system": IM, "user": IM, "assistant": UNTHOUGHT, "tool": IM.replace("{{ m.role }}", "user")}, IM_PROMPT
        ),
        "suat",
    ),
    "deepseek r1": (
        by_role(
            {"system": "{{ m.content }}", "user": "<|User|>{{ m.content }}", "assistant": UNTHOUGHT},
            "<|Assistant|><think>\n",
        ),
        "sua",
    ),
    "an empty thought": (by_role({"user": IM, "assistant": UNTHOUGHT}, IM_PROMPT + "<think>\n\n</think>\n\n"), "ua"),
    "gpt-oss": (
        by_role(
            {
                "developer": "<|start|>developer\n{{ m.content }}<|end|>",
                "user": "<|start|>user\n{{ m.content }}<|end|>",
                "assistant": "<|start|>assistant\n{{ m.content }}<|im_end|>",
            },
            "<|start|>assistant\n",
        ),
        "dua",
    ),
}
OTHERS = ("developer", "function", "observation", "ipython", "moderator", "context", "tool", "system")
BEFORE, BETWEEN = ("{}", "user"), ("user", "assistant", "{}", "user")


def chat(roles: tuple[str, ...], content: str = "Some words.") -> list[Message]:
    return [Message(role=role, content=f"{content} {i}") for i, role in enumerate(roles)]


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_turn_is_written_or_its_row_is_refused(name: str, tokenizer: PreTrainedTokenizerBase) -> None:
    tokenizer.chat_template, written = TEMPLATES[name]
    looks = SpelledSpecialTokens(tokenizer)
    for form, role, answered in product((BEFORE, BETWEEN), OTHERS, (False, True)):
        roles = tuple(each.format(role) for each in form)
        turns = chat((*roles, "assistant") if answered else roles)
        try:
            (text,) = render_chats(tokenizer, [turns[: len(roles)]])
        except DataError:
            continue
        if all(turn.content in text for turn in turns[: len(roles)]):
            looks.look(turns, "a.jsonl row 3")
            assert written is None or role[0] in written
        else:
            place = form.index("{}")
            with pytest.raises(
                DataError, match=rf"^a\.jsonl row 3: turn {place}: .* leaves out .* '{role}' .*; rename"
            ):
                looks.look(turns, "a.jsonl row 3")


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_sequences_before_do_not_change_what_is_refused(name: str, tokenizer: PreTrainedTokenizerBase) -> None:
    tokenizer.chat_template = TEMPLATES[name][0]

    def refuses(check: RoleCheck, roles: tuple[str, ...]) -> bool:
        try:
            check.require(chat(roles), "row 0", whole=True)
        except DataError:
            return True
        return False

    sequences = [each for n in range(1, 4) for each in product(("system", "user", "assistant", "tool"), repeat=n)]
    check = RoleCheck(tokenizer)
    for roles in sequences:
        assert refuses(check, roles) == refuses(RoleCheck(tokenizer), roles)


def test_many_sequences_of_roles_need_few_renderings(
    tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    rendered, draw = list[object](), Random(0)
    monkeypatch.setattr("megarl.data.roles.render_chats", lambda *a, **k: rendered.append(a) or render_chats(*a, **k))
    check = RoleCheck(tokenizer)
    for _ in range(1000):
        roles = draw.choices(("user", "assistant", "tool"), k=draw.randint(4, 12))
        check.require(chat((*draw.choice(((), ("system",))), *roles)), "row 0", whole=True)
    assert 10 < len(rendered) < 200


def test_a_sequence_of_roles_is_rendered_once(tokenizer: PreTrainedTokenizerBase) -> None:
    check = RoleCheck(tokenizer)
    check.require(chat(("user", "assistant")), "row 0", whole=True)
    tokenizer.chat_template = "nothing"
    check.require(chat(("user", "assistant"), "Others."), "row 1", whole=True)
    with pytest.raises(DataError, match=r"^row 2: turn 0: "):
        check.require(chat(("user",)), "row 2", whole=True)


def test_blank_turns_and_thoughts_of_earlier_answers_may_be_left_out(tokenizer: PreTrainedTokenizerBase) -> None:
    tokenizer.chat_template = by_role({"user": IM, "assistant": UNTHOUGHT}, IM_PROMPT)
    turns = [Message(role="system", content=" "), *chat(("user", "assistant", "user", "assistant"))]
    turns[2] = Message(role="assistant", content="<think>Zq</think>so")
    SpelledSpecialTokens(tokenizer).look(turns, "row 0", whole=True)


WHY = "Why"
THOUGHTS = (f"<think>{WHY}</think>3", f"{WHY}\n</think>\n\n3", f"So <think>\n{WHY}</think>3", f"[THINK]{WHY}[/THINK]3")


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_last_answers_thought_is_written_or_its_row_is_refused(
    name: str, tokenizer: PreTrainedTokenizerBase
) -> None:
    tokenizer.chat_template = TEMPLATES[name][0]
    looks, question = SpelledSpecialTokens(tokenizer), chat(("user",))
    for answer in THOUGHTS:
        turns = [*question, Message(role="assistant", content=answer)]
        looks.look(turns, "row 0")
        if WHY in render_chats(tokenizer, [turns], add_generation_prompt=False)[0]:
            looks.look(turns, "row 0", whole=True)
        else:
            with pytest.raises(DataError, match=r"^row 1: turn 1: .* leaves out the last answer's thought, .*; remove"):
                looks.look(turns, "row 1", whole=True)


ANSWERS = {
    "<think>\n1+2=3\n</think>\n\n3": "1+2=3\n</think>\n\n3",
    "<think>1+2=3</think>3": "1+2=3</think>3",
    "<think> 1+2=3</think> 3": "1+2=3</think> 3",
    "\n<think>\n1+2=3\n</think>\n\n3": "1+2=3\n</think>\n\n3",
    "<Think>1+2=3</Think>3": "1+2=3</Think>3",
    "1+2=3\n</think>\n\n3": "1+2=3\n</think>\n\n3",
}


@pytest.mark.parametrize("answer", ANSWERS)
@pytest.mark.parametrize("ending", ["<think>\n", "<think>", "</think>", "<think>\n\n</think>\n\n"])
def test_a_thought_is_opened_and_closed_once(ending: str, answer: str, tokenizer: PreTrainedTokenizerBase) -> None:
    tokenizer.chat_template = looped(IM, IM_PROMPT + ending)
    question = chat(("user",))
    if "</think>" in ending:
        with pytest.raises(DataError, match=r"^row 4: the answer is .* a thought that is closed already; remove"):
            Answers(tokenizer).demonstration(question, answer, where="row 4")
        return
    text = tokenizer.decode(Answers(tokenizer).demonstration(question, answer, where="row 4"))
    assert text.removesuffix("<|im_end|>").lstrip(" \n" if ending == "<think>" else "") == ANSWERS[answer]


@pytest.mark.parametrize("name", ["<think>\n", "<think>", "<reasoning>", "<seed:think>\n"])
def test_an_answer_goes_on_with_the_thought_that_the_prompt_opens(
    name: str, tokenizer: PreTrainedTokenizerBase
) -> None:
    tokenizer.chat_template = looped(IM, IM_PROMPT + name)
    question, closing = chat(("user",)), name.strip().replace("<", "</")
    for answer in (f"{closing}\n\n3", f"\n{closing}3", f"1+2=3{closing}3"):
        assert tokenizer.decode(Answers(tokenizer).demonstration(question, answer)).startswith(answer)
    for answer in ("3", "<thoughts>1+2</thoughts>3", "In <think> tags: 3"):
        said = rf"^row 5: the answer is .* ends with .*{name.strip()}.*; begin it with {closing} or .* or let "
        with pytest.raises(DataError, match=said):
            Answers(tokenizer).demonstration(question, answer, where="row 5")
        with pytest.raises(DataError, match=r"^row 5: turn 1: the answer is .*, so that "):
            Answers(tokenizer).turns([*question, Message(role="assistant", content=answer)], [1], where="row 5")


@pytest.mark.parametrize("ending", ["", "<think>\n", "<reasoning>"])
def test_a_target_ends_the_thought_within_which_the_prefill_stops(
    ending: str, tokenizer: PreTrainedTokenizerBase
) -> None:
    tokenizer.chat_template = looped(IM, IM_PROMPT + ending)
    name = ending.strip() or "<think>"
    closing = name.replace("<", "</")
    begun = Message(role="assistant", content=f"{name}\nLet me see")
    # A closed thought leaves nothing to end, and neither does a question that speaks of thoughts.
    asked = [Message(role="user", content="Write <think> first"), Message(role="assistant", content="Well")]
    for prompt, answer in (
        ([*chat(("user",)), begun], f": 3.{closing}3"),
        ([*chat(("user",)), replace(begun, content=f"{name}1{closing}It")], " is 3"),
        *([(asked, " is 3")] if not ending else []),
    ):
        assert tokenizer.decode(Answers(tokenizer).demonstration(prompt, answer)) == answer + "<|im_end|>"
    for answer in (": 3", f"{name}3{closing}3"):
        with pytest.raises(DataError, match=rf"^row 6: the answer is .* never ends; begin it with {closing}"):
            Answers(tokenizer).demonstration([*chat(("user",)), begun], answer, where="row 6")


@pytest.mark.parametrize("ending", ["</think>", "<think>\n\n</think>\n\n"])
def test_an_empty_thought_is_not_written_a_second_time(ending: str, tokenizer: PreTrainedTokenizerBase) -> None:
    tokenizer.chat_template = looped(IM, IM_PROMPT + ending)
    ids = Answers(tokenizer).demonstration(chat(("user",)), "<think>\n\n</think>\n\nIn <think> tags.")
    assert tokenizer.decode(ids) == "In <think> tags.<|im_end|>"


def test_whole_chats_open_a_thought_once(tokenizer: PreTrainedTokenizerBase) -> None:
    tokenizer.chat_template = by_role({"user": IM, "assistant": IM.replace("\n{{", "\n<think>\n{{")}, IM_PROMPT)
    looks, thought = SpelledSpecialTokens(tokenizer), Message(role="assistant", content="<think>a</think>b")
    looks.look(chat(("user", "assistant")), "row 0", whole=True)
    with pytest.raises(DataError, match=r"^row 1: turn 1: the chat template opens a thought before the answer"):
        looks.look([*chat(("user",)), thought], "row 1", whole=True)
