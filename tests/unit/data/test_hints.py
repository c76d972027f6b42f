"""Hints: their texts, their places in prompts, and rows with them."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import ByT5Tokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from megarl.config.algo import HintConfig
from megarl.data.chat import encode_chats
from megarl.data.hints import (
    HintedPrompt,
    HintPlacer,
    Missing,
    UserTagNotFound,
    donors,
    hint_text,
    hinted_rows,
    survey_hints,
)
from megarl.data.records import Message
from megarl.errors import DataError
from megarl.types import IntArray, Prompt, Row
from megarl_lab.recipes.tiny_model import CHAT_TEMPLATE, SPECIAL_TOKENS, make_byte_tokenizer

GOLDEN = Path(__file__).parents[2] / "golden" / "algos.json"
LINE = HintConfig(template="Hint: {hint}\n")


def golden(case_id: str) -> dict[str, Any]:
    cases = json.loads(GOLDEN.read_text(encoding="utf-8"))["cases"]
    return next(case for case in cases if case["id"] == case_id)


def ids(values: Any) -> IntArray:
    return np.asarray(values, dtype=np.int64)


def prompt(uid: str = "q:0", ground_truth: str = "3", **extra_info: Any) -> Prompt:
    return Prompt(uid=uid, token_ids=(1,), data_source="q", ground_truth=ground_truth, extra_info=extra_info)


def chat(*turns: str) -> tuple[Message, ...]:
    """Turns of user and assistant, after one of the system if the first begins with "system:"."""
    system = (
        [Message(role="system", content=turns[0].removeprefix("system:"))] if turns[0].startswith("system:") else []
    )
    roles = ("user", "assistant") * len(turns)
    return (*system, *(Message(role=r, content=c) for r, c in zip(roles, turns[len(system) :], strict=False)))


def asked(tokenizer: PreTrainedTokenizerBase, *turns: str, hint: str | None = "1+2=3", uid: str = "q:0") -> Prompt:
    """A prompt as the data set makes it, with a solution."""
    messages = chat(*turns)
    return Prompt(
        uid=uid,
        token_ids=tuple(encode_chats(tokenizer, [messages])[0]),
        data_source="q",
        ground_truth="3",
        extra_info={} if hint is None else {"gold_solution": hint},
        messages=messages,
    )


def placed(
    tokenizer: PreTrainedTokenizerBase, question: Prompt, cfg: HintConfig = LINE, max_prompt_tokens: int = 999
) -> HintedPrompt:
    return HintPlacer(tokenizer, cfg, max_prompt_tokens=max_prompt_tokens).place(question)


def text_of(tokenizer: PreTrainedTokenizerBase, hinted: HintedPrompt) -> str:
    text: str = tokenizer.decode(hinted.token_ids)
    return text


def make_row(prompt_ids: Any, response_ids: Any, uid: str = "q:0", sample_index: int = 0) -> Row:
    return Row(
        uid=uid,
        sample_index=sample_index,
        token_ids=ids([*prompt_ids, *response_ids]),
        num_prompt_tokens=len(prompt_ids),
        loss_mask=np.arange(len(response_ids)) % 2 == 0,
        quantities={"rollout_logprobs": np.zeros(len(response_ids), np.float32)},
    )


def merging_tokenizer() -> PreTrainedTokenizerBase:
    """As Qwen's: text is split by its pattern, and line feeds or blanks in a row are one token."""
    pattern = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    merges = [("Ċ", "Ċ"), ("Ġ", "Ġ"), ("Ġ", "h"), ("Ġh", "e"), ("l", "l"), ("ll", "o"), ("Ġhe", "llo")]
    symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*SPECIAL_TOKENS, *symbols, *(a + b for a, b in merges)]
    backend = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIAL_TOKENS])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=SPECIAL_TOKENS[2])
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def slow_tokenizer() -> PreTrainedTokenizerBase:
    """One that gives no offsets; every byte is a token."""
    tokenizer = ByT5Tokenizer()
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


TOKENIZERS = [make_byte_tokenizer, merging_tokenizer, slow_tokenizer]


def test_tools_stand_in_the_hinted_prompt_as_in_the_plain_one() -> None:
    tokenizer = make_byte_tokenizer()
    tokenizer.chat_template = (
        "{% if tools %}{{ tools | length }} tools: {{ tools[0].function.name }}\n{% endif %}"
        + str(tokenizer.chat_template)
    )
    tools = {"shop": [{"type": "function", "function": {"name": "buy", "description": "Buy.", "parameters": {}}}]}
    placer = HintPlacer(tokenizer, LINE, max_prompt_tokens=999, tools_of=tools.__getitem__)
    question = asked(tokenizer, "1+2=?")
    plain, talking = (
        text_of(tokenizer, placer.place(each)) for each in (question, replace(question, environment="shop"))
    )
    assert "1+2=3" in plain
    assert talking == f"1 tools: buy\n{plain}"


# --- texts


@pytest.mark.parametrize("extra_info", [{}, {"gold_solution": " \n"}])
def test_a_prompt_without_a_hint(tokenizer: PreTrainedTokenizerBase, extra_info: dict[str, Any]) -> None:
    bare = replace(asked(tokenizer, "1+2=?", uid="gsm8k:7"), extra_info=extra_info)
    assert hint_text(bare, HintConfig()) is None
    found = placed(tokenizer, bare)
    assert (found.missing, found.num_hint_tokens) == (Missing.NO_TEXT, 0)
    assert found.token_ids.tolist() == list(bare.token_ids)
    with pytest.raises(DataError, match=r"prompt gsm8k:7: has no hint: expected text in extra_info\.gold_solution or"):
        placed(tokenizer, bare, HintConfig(on_missing="error"))


# --- places


@pytest.mark.parametrize(
    ("place", "template", "expected"),
    [
        # Without a template, a blank line is between the hint and the other text.
        ("before_question", None, ("system:Add.", "1", "2", "1+2=3\n\n1+2=?")),
        ("after_question", None, ("system:Add.", "1", "2", "1+2=?\n\n1+2=3")),
        ("system", None, ("system:Add.\n\n1+2=3", "1", "2", "1+2=?")),
        ("user_turn", None, ("system:Add.", "1", "2", "1+2=3\n\n1+2=?")),
        ("before_question", "Hint: {hint}\n", ("system:Add.", "1", "2", "Hint: 1+2=3\n1+2=?")),
        ("after_question", "\n{hint}!", ("system:Add.", "1", "2", "1+2=?\n1+2=3!")),
        ("system", " {hint}", ("system:Add. 1+2=3", "1", "2", "1+2=?")),
        ("user_turn", "A: {hint}\nQ: {question} {question}.", ("system:Add.", "1", "2", "A: 1+2=3\nQ: 1+2=? 1+2=?.")),
    ],
)
@pytest.mark.parametrize("make", TOKENIZERS)
def test_the_last_user_turn_or_the_system_turn(
    make: Any, place: Any, template: str | None, expected: Sequence[str]
) -> None:
    tokenizer, cfg = make(), HintConfig(place=place, template=template)
    found = placed(tokenizer, asked(tokenizer, "system:Add.", "1", "2", "1+2=?"), cfg)
    assert found.token_ids.tolist() == encode_chats(tokenizer, [chat(*expected)])[0]
    assert found.text[1] == "1+2=3"


# --- cuts


@given(st.text("aé€😀 \n", max_size=12), st.integers(1, 20), st.integers(0, 60), st.sampled_from(TOKENIZERS))
def test_only_the_hint_is_cut(hint: str, max_tokens: int, max_prompt_tokens: int, make: Any) -> None:
    """Also within characters of several bytes, each of which is a token here."""
    tokenizer = make()
    question = asked(tokenizer, "1+2=?", hint=hint)
    found = placed(tokenizer, question, replace(LINE, max_tokens=max_tokens), max_prompt_tokens)
    if found.missing is not None:
        assert found.token_ids.tolist() == list(question.token_ids)
        return
    before, kept, after = found.text
    assert before + kept + after == f"<|im_start|>user\nHint: {kept}\n1+2=?<|im_end|>\n<|im_start|>assistant\n"
    assert hint.startswith(kept)
    assert found.is_cut == (kept != hint)
    assert len(found.token_ids) <= max_prompt_tokens
    assert found.num_hint_tokens == len(tokenizer(kept, add_special_tokens=False)["input_ids"]) <= max_tokens


# --- hints of other prompts


@given(st.dictionaries(st.text("abc", max_size=3), st.booleans(), max_size=8), st.integers(0, 5), st.randoms())
def test_donors_are_other_prompts(has_hint: dict[str, bool], seed: int, random: Any) -> None:
    hinted = {
        uid: HintedPrompt(token_ids=ids([1]), missing=None if has else Missing.NO_TEXT) for uid, has in has_hint.items()
    }
    got = donors(hinted, seed=seed)
    with_hint = {uid for uid, has in has_hint.items() if has}
    assert set(got) == (with_hint if len(with_hint) > 1 else set())
    assert sorted(got.values()) == sorted(got)
    assert all(uid != donor for uid, donor in got.items())
    items = list(hinted.items())
    random.shuffle(items)
    assert donors(dict(items), seed=seed) == got


# --- golden


def word_tokenizer() -> PreTrainedTokenizerBase:
    """Words are ids, as in the golden cases: 101 and 102 begin and end a turn of 20, 21 or 22, the assistant."""
    backend = Tokenizer(models.WordLevel(vocab={str(i): i for i in range(103)}, unk_token="99"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    turn = "101 {{ 21 if m.role == 'system' else 20 }} 10 {{ m.content }} 102 10 "
    tokenizer.chat_template = f"{{% for m in messages %}}{turn}{{% endfor %}}101 22 10"
    return tokenizer


def words(values: Sequence[int]) -> str:
    return " ".join(map(str, values))


def golden_prompt(prompt_ids: Sequence[int], hint: Sequence[int]) -> tuple[Prompt, HintConfig]:
    """The prompt of a golden case as a chat, whose rendering has its ids."""
    turns = words(prompt_ids).removesuffix("101 22 10").split("102 10")[:-1]
    contents = [turn.split(" 10 ")[1].strip() for turn in turns]
    made = asked(
        word_tokenizer(), *(["system:" + contents[0]] if len(turns) > 1 else []), contents[-1], hint=words(hint)
    )
    assert list(made.token_ids) == list(prompt_ids)
    return made, HintConfig(template="{hint} ")


@pytest.mark.parametrize("name", ["fits", "exact", "truncated", "no_room"])
def test_padded_golden(name: str) -> None:
    """A left-padded row, [L columns of prompt, then the response]: the hint takes the place of as many pads."""
    case = golden(f"A.hint.padded.{name}")
    inputs, expected = case["inputs"], case["expected"]
    question, cfg = golden_prompt(inputs["prompt"], inputs["hint"])
    found = placed(word_tokenizer(), question, cfg, inputs["prompt_length"])
    got = hinted_rows([make_row(inputs["prompt"], inputs["response"])], {"q:0": found}).rows[0]
    pads_left = inputs["prompt_length"] - got.num_prompt_tokens
    if expected["hint_kept"]:
        place = expected["insert_index"] - (inputs["prompt_length"] - len(inputs["prompt"]))
        assert len(word_tokenizer()(found.text[0])["input_ids"]) == place
    assert found.text[1] == words(expected["hint_kept"])
    assert [inputs["pad_id"]] * pads_left + got.token_ids.tolist() == expected["input_ids"]
    attention = [0] * pads_left + [1] * got.num_prompt_tokens + inputs["response_mask"]
    assert attention == expected["attention_mask"]
    assert np.maximum(np.arange(len(attention)) - pads_left, 0).tolist() == expected["position_ids"]


def test_missing_tag_golden() -> None:
    """Without a system turn the hint has a place; without a user turn there is none, and that is the error."""
    case = golden("A.hint.missing_tag")
    inputs = case["inputs"]
    question, cfg = golden_prompt(inputs["prompt"], inputs["hint"])
    found = placed(word_tokenizer(), question, cfg, inputs["prompt_length"])
    # Two pads, then three tokens of tag.
    assert 2 + len(word_tokenizer()(found.text[0])["input_ids"]) == 5
    with pytest.raises(UserTagNotFound):
        placed(word_tokenizer(), replace(question, messages=()), replace(cfg, on_missing="error"))
    assert case["expected"]["error"] == UserTagNotFound.__name__


def test_packed_golden() -> None:
    case = golden("A.hint.packed")
    inputs, expected = case["inputs"], case["expected"]
    rows, hinted = [], {}
    for i, (prompt_ids, response, hint) in enumerate(
        zip(inputs["prompts"], inputs["responses"], inputs["hints"], strict=True)
    ):
        question, cfg = golden_prompt(prompt_ids, hint)
        rows.append(make_row(prompt_ids, response, str(i)))
        hinted[str(i)] = placed(word_tokenizer(), question, cfg)
    got = hinted_rows(rows, hinted).rows
    assert np.concatenate([g.token_ids for g in got]).tolist() == expected["input_ids"]
    starts = np.cumsum([0, *(g.num_tokens for g in got)])
    assert starts.tolist() == expected["cu_seqlens"]
    assert np.concatenate([np.arange(g.num_tokens) for g in got]).tolist() == expected["position_ids"]
    # The logits before a token predict it.
    predict = [
        (start + g.num_prompt_tokens - 1 + np.arange(g.num_response_tokens)).tolist()
        for start, g in zip(starts, got, strict=False)
    ]
    assert predict == expected["logit_index"]
    for row, hinted in zip(rows, got, strict=True):
        assert np.array_equal(hinted.loss_mask, row.loss_mask)
        assert np.array_equal(hinted.token_ids[hinted.num_prompt_tokens :], row.token_ids[row.num_prompt_tokens :])


def test_rows_of_a_group_have_one_cut(tokenizer: PreTrainedTokenizerBase) -> None:
    """However long their responses are."""
    question = asked(tokenizer, "1+2=?", hint="12345678")
    rows = [make_row(question.token_ids, [51] * n, sample_index=n) for n in (0, 1, 5, 20)]
    limit = len(question.token_ids) + len("Hint: \n") + 3
    got = hinted_rows(rows, {"q:0": placed(tokenizer, question, max_prompt_tokens=limit)})
    assert {p.text[1] for p in got.prompts} == {"12345678"[: got.prompts[0].num_hint_tokens]}
    assert len({row.num_prompt_tokens for row in got.rows}) == 1
    assert all(row.num_prompt_tokens <= limit for row in got.rows)
    for row, hinted in zip(rows, got.rows, strict=True):
        assert hinted.label == row.label
        assert hinted.token_ids[hinted.num_prompt_tokens :].tolist() == [51] * row.num_response_tokens
        assert hinted.loss_mask.tolist() == row.loss_mask.tolist()
        assert not hinted.quantities


# --- rows


# --- all prompts of a file


def test_a_file_in_which_some_hints_are_missing(tokenizer: PreTrainedTokenizerBase) -> None:
    questions = [
        asked(tokenizer, "1", hint="12345678"),
        asked(tokenizer, "1", hint="12"),
        replace(asked(tokenizer, "1", hint=None), data_source="other"),
        asked(tokenizer, "system:1"),
    ]
    placer = HintPlacer(tokenizer, replace(LINE, max_tokens=4), max_prompt_tokens=99)
    survey = survey_hints(placer, questions)
    survey.require_some(placer)
    assert survey.counts == {
        "q": {"prompts": 3, "placed": 2, "cut": 1, "no_place": 1},
        "other": {"prompts": 1, "no_text": 1},
    }
    assert survey.warnings(placer) == [
        "data.train: 1 of 4 prompts train without a hint: expected text in extra_info.gold_solution or "
        "extra_info.solution (algo.cpo.hint.source=solution)",
        "data.train: 1 of 4 prompts train without a hint: the chat has no user turn in which the model's chat template "
        "writes it (algo.cpo.hint.place=before_question)",
        "data.train: 1 of 2 hints are cut; raise algo.cpo.hint.max_tokens=4, or make room with a higher "
        "actor.micro_batch_tokens or a lower rollout.max_response_tokens",
    ]
    assert survey_hints(placer, questions[1:2]).warnings(placer) == []
    with pytest.raises(DataError, match="prompt q:0: has no hint: expected text in"):
        survey_hints(HintPlacer(tokenizer, HintConfig(on_missing="error"), max_prompt_tokens=99), questions)


def test_a_donated_hint_is_written_as_the_own(tokenizer: PreTrainedTokenizerBase) -> None:
    prompts = {
        uid: asked(tokenizer, f"{uid}?", hint=hint, uid=uid)
        for uid, hint in (("a", "one"), ("b", "three"), ("c", None))
    }
    placer = HintPlacer(tokenizer, replace(LINE, max_tokens=4), max_prompt_tokens=99)
    got = placer.place_all(prompts, donors(placer.place_all(prompts), seed=0))
    expected = {"a": "Hint: thre\na?", "b": "Hint: one\nb?", "c": "c?"}
    for uid, said in expected.items():
        assert got[uid].token_ids.tolist() == encode_chats(tokenizer, [chat(said)])[0]
    assert [got[uid].missing for uid in "abc"] == [None, None, Missing.NO_TEXT]


def test_a_file_without_a_single_hint(tokenizer: PreTrainedTokenizerBase) -> None:
    def error(question: Prompt, cfg: HintConfig = LINE, limit: int = 99) -> str:
        placer = HintPlacer(tokenizer, cfg, max_prompt_tokens=limit)
        with pytest.raises(DataError) as caught:
            survey_hints(placer, [question]).require_some(placer)
        return str(caught.value)

    fields = {"question": "1+2=?", "answer": "1+2=3", "index": 3, "empty": " "}
    gsm8k = replace(asked(tokenizer, "1+2=?"), extra_info=fields)
    assert error(gsm8k) == (
        "data.train: no prompt has a hint: expected text in extra_info.gold_solution or extra_info.solution "
        "(algo.cpo.hint.source=solution); set algo.cpo.hint.field to a field with text, of which there are: answer, "
        "question, or set algo.cpo.method=none"
    )
    assert "expected text in extra_info.reason or the column reason (algo.cpo.hint.field=reason); " in error(
        gsm8k, HintConfig(field="reason")
    )
    assert "the chat has no user turn in which" in error(asked(tokenizer, "system:Add."))
    assert "may have 9 tokens, " in error(asked(tokenizer, "1+2=?"), limit=9)


def test_a_hint_that_is_no_text() -> None:
    with pytest.raises(DataError, match=r"prompt q:0: extra_info.gold_solution is int, expected a string"):
        hint_text(prompt(gold_solution=3), HintConfig())


@pytest.mark.parametrize("make", TOKENIZERS)
@pytest.mark.parametrize("question", ["What is 2+2?", "\nWhat is 2+2?", "  hello", "{hint}", "\n\n"])
def test_a_question_may_begin_with_white_space(make: Any, question: str) -> None:
    tokenizer = make()
    found = placed(tokenizer, asked(tokenizer, question))
    assert found.missing is None
    assert text_of(tokenizer, found) == (
        f"<|im_start|>user\nHint: 1+2=3\n{question}<|im_end|>\n<|im_start|>assistant\n"
    )
    assert found.text[1] == "1+2=3"


def test_the_tokens_are_those_of_the_whole_text() -> None:
    """Two line feeds are one token, whether they come from the template, the hint or the question."""
    tokenizer = merging_tokenizer()
    merged = tokenizer.convert_tokens_to_ids("ĊĊ")
    found = placed(tokenizer, asked(tokenizer, "\nWhy?", hint="\nBecause."))
    assert found.token_ids.tolist() == encode_chats(tokenizer, [chat("Hint: \nBecause.\n\nWhy?")])[0]
    found = placed(tokenizer, asked(tokenizer, "Why?", hint="\nBecause."), HintConfig(template="{hint}"))
    assert merged in found.token_ids
    assert found.token_ids.tolist() == encode_chats(tokenizer, [chat("\nBecause.Why?")])[0]


def test_a_system_turn_of_its_own(tokenizer: PreTrainedTokenizerBase) -> None:
    found = placed(tokenizer, asked(tokenizer, "1+2=?"), HintConfig(place="system"))
    assert found.token_ids.tolist() == encode_chats(tokenizer, [chat("system:1+2=3", "1+2=?")])[0]


def test_texts_that_look_like_places(tokenizer: PreTrainedTokenizerBase) -> None:
    question = asked(tokenizer, "What is {hint}?", hint="A {question}")
    found = placed(tokenizer, question, HintConfig(place="user_turn", template="{hint}\n{question}"))
    assert text_of(tokenizer, found).startswith("<|im_start|>user\nA {question}\nWhat is {hint}?<|im_end|>")


# Templates as model families have them, cut to what matters here.
DEFAULT_SYSTEM = (
    "{% if messages[0]['role'] != 'system' %}<|im_start|>system\nBe kind.<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
)
TRIMMED = (
    "<|endoftext|>{% for m in messages %}<|im_start|>{{ m['role'] }}<|im_start|>\n\n{{ m['content'] | trim }}"
    "<|im_end|>{% endfor %}"
)
BRACKETS = (
    "{% for m in messages %}{% if m['role'] == 'user' %}[INST]{{ m['content'] }}[/INST]"
    "{% else %}{{ m['content'] }}<|im_end|>{% endif %}{% endfor %}"
)
BARE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (DEFAULT_SYSTEM, "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\n Six?\n 1+5=? <|im_end|>\n"),
        (TRIMMED, "<|endoftext|><|im_start|>user<|im_start|>\n\nSix?\n 1+5=?<|im_end|>"),
        (BRACKETS, "[INST] Six?\n 1+5=? [/INST]"),
        (BARE, " Six?\n 1+5=? "),
    ],
)
def test_any_template_has_a_place(template: str, expected: str) -> None:
    tokenizer = make_byte_tokenizer()
    tokenizer.chat_template = template
    question = asked(tokenizer, " 1+5=? ", hint=" Six?")
    assert text_of(tokenizer, placed(tokenizer, question, HintConfig(template="{hint}\n"))) == expected


def test_metrics_of_a_batch(tokenizer: PreTrainedTokenizerBase) -> None:
    """Rows with a hint, with one that is cut, and with none for each of the reasons."""
    long = "1" * 40
    prompts = {
        "fits": asked(tokenizer, "1", hint="12"),
        "cut": asked(tokenizer, "1", hint="12345678"),
        "no text": asked(tokenizer, "1", hint=None),
        "no place": asked(tokenizer, "system:1"),
        "no room": asked(tokenizer, long, hint="12"),
    }
    limit = len(prompts["no room"].token_ids)
    placer = HintPlacer(tokenizer, HintConfig(max_tokens=4), max_prompt_tokens=limit)
    rows = [make_row(p.token_ids, [51], uid) for uid, p in prompts.items()]
    got = hinted_rows(rows, placer.place_all(prompts))
    assert got.has_hint.tolist() == [True, True, False, False, False]
    assert got.metrics() == {
        "cpo/hint_len_mean": 3.0,
        "cpo/hint_truncated_frac": 0.2,
        "cpo/hint_no_text_frac": 0.2,
        "cpo/hint_no_place_frac": 0.2,
        "cpo/hint_no_room_frac": 0.2,
    }
    assert hinted_rows([], {}).metrics() == {}


@pytest.mark.parametrize(
    ("template", "turns"),
    [
        # It drops what users say, it refuses a system turn, there is no user turn.
        ("{% for m in messages %}{{ m['role'] }}{% endfor %}", ("1+2=?",)),
        ("{% if messages[1] %}{{ raise_exception('one turn only') }}{% endif %}", ("1", "2", "3")),
        (CHAT_TEMPLATE, ("system:Add.",)),
    ],
)
def test_prompts_without_a_place(tokenizer: PreTrainedTokenizerBase, template: str, turns: Sequence[str]) -> None:
    other = make_byte_tokenizer()
    other.chat_template = template
    question = asked(tokenizer, *turns)
    found = placed(other, question)
    assert found.missing is Missing.NO_PLACE
    assert found.token_ids.tolist() == list(question.token_ids)
    message = r"prompt q:0: has no hint: the chat has no user turn .* \(algo\.cpo\.hint\.place=before_question\)"
    with pytest.raises(UserTagNotFound, match=message):
        placed(other, question, HintConfig(on_missing="error"))


@pytest.mark.parametrize("make", TOKENIZERS)
def test_a_hint_leaves_room(make: Any) -> None:
    """Whatever the prompt and the template need is not the hint's."""
    tokenizer = make()
    question = asked(tokenizer, "1+2=?", hint="12345678")
    empty = len(encode_chats(tokenizer, [chat("Hint: \n1+2=?")])[0])
    for room in range(10):
        found = placed(tokenizer, question, max_prompt_tokens=empty + room)
        assert found.num_hint_tokens == min(room, 8)
        assert found.is_cut == (0 < room < 8)
        assert found.missing is (None if room else Missing.NO_ROOM)
        assert len(found.token_ids) <= empty + room
    with pytest.raises(DataError, match=r"prompt and hint may have 3 tokens, which is what actor\.micro_batch_tokens"):
        placed(tokenizer, question, replace(LINE, on_missing="error"), max_prompt_tokens=3)


def test_text_of_a_demonstration(tokenizer: PreTrainedTokenizerBase) -> None:
    cfg = HintConfig(source="demonstration")
    assert hint_text(replace(prompt(solution="1+2"), target="1+2=3\n3"), cfg) == "1+2=3\n3"
    assert hint_text(prompt(solution="1+2"), cfg) is None
    bare = asked(tokenizer, "1+2=?", uid="sums:7")
    missing = r"expected text in the column data\.target_key \(algo\.cpo\.hint\.source=demonstration\)"
    with pytest.raises(DataError, match=missing):
        placed(tokenizer, bare, replace(cfg, on_missing="error"))


def test_text_of_a_named_field() -> None:
    """As verl's GSM8K files have it."""
    gsm8k = prompt(answer="2+2 = 4\n#### 4", gold_solution="other")
    assert hint_text(gsm8k, HintConfig(field="answer")) == "2+2 = 4\n#### 4"
    assert hint_text(gsm8k, HintConfig(field="solution")) is None


def test_text_of_a_solution_and_of_an_answer() -> None:
    answer = HintConfig(source="answer")
    assert hint_text(prompt(gold_solution="1+2", solution="other"), HintConfig()) == "1+2"
    assert hint_text(prompt(solution="1+{2}"), HintConfig()) == "1+{2}"
    assert hint_text(prompt(ground_truth="3"), answer) == "3"
    assert hint_text(replace(prompt(), extra_info={"ground_truth": "4"}), answer) == "4"
