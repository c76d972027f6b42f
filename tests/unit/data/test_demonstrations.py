"""Rows of supervised training: the forms of chats, which tokens are trained, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerBase

from megarl.config.schema import DataConfig, SftConfig
from megarl.data.demonstrations import SftDataset
from megarl.errors import DataError
from megarl_lab.recipes.tiny_model import make_byte_tokenizer

# <|im_start|>user\n … <|im_end|>\n<|im_start|>assistant\n around a question of one token per character.
NUM_TEMPLATE_TOKENS = 8


def demonstration(question: str, answer: str) -> dict[str, Any]:
    return {
        "prompt": [{"role": "user", "content": question}],
        "target": [{"role": "assistant", "content": answer}],
    }


# As Gemma has it: turns do not end with the eos token. As Mistral has it: answers begin with a space.
GEMMA = (
    "{% for m in messages %}<start_of_turn>{{ m['role'] }}{{ '\\n' }}{{ m['content'] | trim }}<end_of_turn>{{ '\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}<start_of_turn>assistant{{ '\\n' }}{% endif %}"
)
MISTRAL = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %} {{ m['content'] }}{{ eos_token }}"
    "{% elif m['role'] == 'user' %}[INST] {{ m['content'] }}[/INST]{% endif %}{% endfor %}"
)


CHAT = [
    {"role": "system", "content": "s"},
    {"role": "user", "content": "1+1"},
    {"role": "assistant", "content": "2"},
    {"role": "user", "content": "+3"},
    {"role": "assistant", "content": "55"},
]
TEXT = (
    "<|im_start|>system\ns<|im_end|>\n<|im_start|>user\n1+1<|im_end|>\n<|im_start|>assistant\n2<|im_end|>\n"
    "<|im_start|>user\n+3<|im_end|>\n<|im_start|>assistant\n55<|im_end|>"
)
# A template that leaves the thoughts of earlier answers out, as reasoning models have it.
FORGETFUL = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{{ m['content'].split('</think>')[-1] if m['role'] == 'assistant' else m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    return path


def open_rows(
    path: Path,
    tokenizer: PreTrainedTokenizerBase,
    settings: SftConfig | None = None,
    form: DataConfig | None = None,
) -> SftDataset:
    return SftDataset([path], tokenizer, max_prompt_tokens=200, max_response_tokens=200, settings=settings, form=form)


def trained_texts(data: SftDataset, tokenizer: PreTrainedTokenizerBase, index: int = 0) -> list[str]:
    """The runs of trained tokens of a row, as text."""
    row = data[index]
    response = row.token_ids[row.num_prompt_tokens :].tolist()
    texts, previous = [], False
    for token, trains in zip(response, row.loss_mask.tolist(), strict=True):
        if trains:
            texts = [*texts[:-1], texts[-1] + [token]] if previous else [*texts, [token]]
        previous = trains
    return [tokenizer.decode(ids) for ids in texts]


def test_demonstrations_have_loss_on_the_response(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [demonstration("1", "22"), demonstration("333", "4")])
    data = SftDataset([path], tokenizer, max_prompt_tokens=100, max_response_tokens=3)
    assert len(data) == 2
    assert [data[i].num_prompt_tokens for i in range(2)] == [NUM_TEMPLATE_TOKENS + 1, NUM_TEMPLATE_TOKENS + 3]
    assert [data[i].loss_mask.tolist() for i in range(2)] == [[True] * 3, [True] * 2]  # eos is learned too
    assert [data[i].label for i in range(2)] == ["sft:0/0", "sft:1/0"]
    assert tokenizer.decode(data[0].token_ids) == "<|im_start|>user\n1<|im_end|>\n<|im_start|>assistant\n22<|im_end|>"


@pytest.mark.parametrize(
    "answer",
    [
        {"target": [{"role": "assistant", "content": "2"}]},
        {"response": "2"},
        {"completion": [{"role": "assistant", "content": "2"}]},
        {"completion": "2"},
    ],
    ids=["LUFFY", "verl", "TRL", "TRL text"],
)
def test_a_prompt_with_one_answer(answer: dict[str, Any], tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    data = open_rows(write(tmp_path / "a.jsonl", [{"prompt": "1+1", **answer}]), tokenizer)
    assert trained_texts(data, tokenizer) == ["2<|im_end|>"]


def test_every_answer_of_a_chat_is_trained_with_its_end_token(
    tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    data = open_rows(write(tmp_path / "a.jsonl", [{"messages": CHAT}]), tokenizer)
    assert tokenizer.decode(data[0].token_ids) == TEXT
    assert trained_texts(data, tokenizer) == ["2<|im_end|>", "55<|im_end|>"]
    prompt = tokenizer.decode(data[0].token_ids[: data[0].num_prompt_tokens])
    assert prompt == TEXT[: TEXT.index("2<|im_end|>")]


def test_parquet_and_sharegpt_say_the_same(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    speakers = {"system": "system", "user": "human", "assistant": "gpt"}
    turns = [{"from": speakers[turn["role"]], "value": turn["content"]} for turn in CHAT]
    path = tmp_path / "a.parquet"
    pq.write_table(pa.Table.from_pylist([{"messages": CHAT}]), path)
    shared = open_rows(write(tmp_path / "a.jsonl", [{"conversations": turns}]), tokenizer)
    for data in (shared, open_rows(path, tokenizer)):
        assert tokenizer.decode(data[0].token_ids) == TEXT
        assert trained_texts(data, tokenizer) == ["2<|im_end|>", "55<|im_end|>"]


@pytest.mark.parametrize(
    "mark",
    [
        *({name: False} for name in ("train", "training", "trainable", "loss")),
        *({name: 0} for name in ("train", "weight", "loss", "loss_mask", "step_loss_mask")),
        {"loss_weight": 0.0},
        {"masked": True},
        {"train": True, "weight": 0},
    ],
    ids=str,
)
def test_a_turn_can_be_left_out(mark: dict[str, Any], tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    chat = [turn | mark if turn["content"] == "2" else turn for turn in CHAT]
    data = open_rows(write(tmp_path / "a.jsonl", [{"messages": chat}]), tokenizer)
    assert tokenizer.decode(data[0].token_ids) == TEXT
    assert trained_texts(data, tokenizer) == ["55<|im_end|>"]


def test_the_last_answer_alone(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [{"messages": CHAT}])
    data = open_rows(path, tokenizer, SftConfig(train_on="last"))
    assert trained_texts(data, tokenizer) == ["55<|im_end|>"]
    assert data[0].loss_mask.tolist() == [True] * 3


def test_turns_after_the_last_answer_are_left_out(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [{"messages": [*CHAT, {"role": "user", "content": "thanks"}]}])
    assert tokenizer.decode(open_rows(path, tokenizer)[0].token_ids) == TEXT


def test_spaces_that_a_template_strips_are_not_trained(tmp_path: Path) -> None:
    tokenizer = make_byte_tokenizer()
    tokenizer.chat_template = FORGETFUL.replace(".split('</think>')[-1]", " | trim")
    chat = [turn | {"content": "2 \n"} if turn["content"] == "2" else turn for turn in CHAT]
    data = open_rows(write(tmp_path / "a.jsonl", [{"messages": chat}]), tokenizer)
    assert tokenizer.decode(data[0].token_ids) == TEXT


def test_a_template_that_rewrites_answers_is_an_error_with_its_remedy(tmp_path: Path) -> None:
    tokenizer = make_byte_tokenizer()
    tokenizer.chat_template = FORGETFUL
    chat = [turn | {"content": "<think>a</think>2"} if turn["content"] == "2" else turn for turn in CHAT]
    path = write(tmp_path / "a.jsonl", [{"messages": CHAT}, {"messages": chat}])
    with pytest.raises(DataError, match=r"a\.jsonl row 1: before the next answer, .*turn 2 .* set sft.train_on to"):
        open_rows(path, tokenizer)
    data = open_rows(path, tokenizer, SftConfig(train_on="last"))
    assert trained_texts(data, tokenizer, 1) == ["55<|im_end|>"]


def test_the_mask_is_that_of_a_template_with_generation_tags(tmp_path: Path) -> None:
    """Tags mark the text and the end token of every answer; transformers is the reference for ids and mask."""
    tokenizer = make_byte_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m['role'] + '\\n' }}{% if m['role'] == 'assistant' %}{% generation %}"
        "{{ m['content'] }}<|im_end|>{% endgeneration %}{% else %}{{ m['content'] }}<|im_end|>{% endif %}{{ '\\n' }}"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    row = open_rows(write(tmp_path / "a.jsonl", [{"messages": CHAT}]), tokenizer)[0]
    expected = tokenizer.apply_chat_template(
        CHAT, tokenize=True, return_dict=True, return_assistant_tokens_mask=True, add_generation_prompt=False
    )
    # The reference goes on with the line feed after the last end token.
    assert row.token_ids.tolist() == expected["input_ids"][:-1]
    mask = [bool(m) for m in expected["assistant_masks"][:-1]]
    assert [False] * row.num_prompt_tokens + row.loss_mask.tolist() == mask


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"messages": CHAT[:2]}, r"row 0: the row has roles \['system', 'user'\], expected an answer"),
        ({"messages": CHAT[2:3]}, "expected an answer of the assistant to train on, after another turn"),
        ({"conversations": [{"from": "bird", "value": "x"}]}, r"conversations\[0\]: from is 'bird', expected one of"),
        ({"messages": [{"role": "user"}]}, r"messages\[0\]: content is missing"),
        (
            {"prompt": "1+1"},
            r"got columns \['prompt'\], expected messages, conversations, or prompt with",
        ),
        ({"prompt": "1+1", "target": [{"role": "user", "content": "2"}]}, r"target has roles \['user'\]"),
        ({"messages": [*CHAT[:2], {"role": "assistant", "content": "2<|im_end|>3"}]}, "turn 2: the target is"),
        ({"messages": "hello"}, r"messages is str, expected a list"),
        (
            {"messages": [*CHAT[:2], CHAT[2] | {"weight": 0.5}]},
            r"messages\[2\]: weight is 0.5, expected true or false, or 1 or 0",
        ),
        ({"messages": [*CHAT[:2], CHAT[2] | {"train": "no"}]}, r"messages\[2\]: train is 'no', expected true or false"),
        (
            {"messages": [*CHAT[:2], CHAT[2] | {"tool_calls": [{"name": "add"}]}]},
            r"row 0: messages\[2\]: tool_calls is not read here; write it into the turn's text",
        ),
        ({"messages": [*CHAT[:2], CHAT[2] | {"reasoning_content": "1 and 1"}]}, "reasoning_content is not read here"),
        (
            {"messages": CHAT, "tools": [{"name": "add"}]},
            "row 0: tools is not read here; write the tools",
        ),
    ],
)
def test_bad_rows(row: dict[str, Any], message: str, tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=message):
        open_rows(write(tmp_path / "a.jsonl", [row]), tokenizer)


def test_one_limit_for_the_whole_row(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [{"messages": CHAT}])
    # The end of the first answer, then the end of the row.
    first, whole = (len(tokenizer(text)["input_ids"]) for text in (TEXT[: TEXT.index("2<|im_end|>")] + "2", TEXT))

    def opened(max_tokens: int, on_long: str = "error") -> SftDataset:
        settings = SftConfig(max_tokens=max_tokens, on_long=on_long)  # type: ignore[arg-type]
        return SftDataset([path], tokenizer, max_prompt_tokens=1, max_response_tokens=1, settings=settings)

    assert opened(whole)[0].num_tokens == whole
    with pytest.raises(DataError, match=rf"row 0: the row has {whole} tokens, sft.max_tokens is {whole - 1}; raise it"):
        opened(whole - 1)
    assert trained_texts(opened(whole - 1, "cut"), tokenizer) == ["2<|im_end|>", "55"]
    # A cut within the user's second turn leaves that turn out as well.
    assert opened(first + 4, "cut")[0].num_tokens == first + 1
    assert trained_texts(opened(first, "cut"), tokenizer) == ["2"]
    with pytest.raises(DataError, match=rf"all 1 rows are over sft.max_tokens={first - 1}; raise it"):
        opened(first - 1, "cut")


def test_a_system_turn_that_moves_to_the_last_question_is_an_error(tmp_path: Path) -> None:
    tokenizer = make_byte_tokenizer()
    # Of a chat that ends with a question or the answer to it.
    last = "messages[0]['role'] == 'system' and loop.index0 >= messages | length - 2"
    system = f"{{% if {last} %}}{{{{ messages[0]['content'] }}}}{{% endif %}}"
    tokenizer.chat_template = MISTRAL.replace("[INST] ", f"[INST] {system}")
    path = write(tmp_path / "a.jsonl", [{"messages": CHAT[:3]}, {"messages": CHAT}])
    with pytest.raises(DataError, match=r"row 1: up to turn 2 the chat template renders .* set sft.train_on to each"):
        open_rows(path, tokenizer)
    assert len(open_rows(path, tokenizer, SftConfig(train_on="each"))) == 3
    empty = [*CHAT[1:2], {"role": "assistant", "content": " "}]
    with pytest.raises(DataError, match=r"row 0: turn 1: the target is ' ', expected text"):
        open_rows(write(path, [{"messages": empty}]), tokenizer)


def test_each_answer_can_have_a_row_as_the_policy_sees_it(tmp_path: Path) -> None:
    tokenizer = make_byte_tokenizer()
    tokenizer.chat_template = FORGETFUL
    chat = [turn | {"content": "<think>a</think>2"} if turn["content"] == "2" else turn for turn in CHAT]
    data = open_rows(write(tmp_path / "a.jsonl", [{"messages": chat}]), tokenizer, SftConfig(train_on="each"))
    assert len(data) == 2
    assert trained_texts(data, tokenizer, 0) == ["<think>a</think>2<|im_end|>"]
    assert trained_texts(data, tokenizer, 1) == ["55<|im_end|>"]
    assert tokenizer.decode(data[1].token_ids) == TEXT


def test_every_token_of_the_rendered_chat(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    chat = [turn | {"train": False} for turn in CHAT[:-1]] + CHAT[-1:]
    data = open_rows(write(tmp_path / "a.jsonl", [{"messages": chat}]), tokenizer, SftConfig(train_on="every_token"))
    assert tokenizer.decode(data[0].token_ids) == TEXT + "\n"
    # The first token has nothing to be predicted from.
    assert data[0].num_prompt_tokens == 1
    assert data[0].loss_mask.all()


def test_columns_can_have_other_names(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [{"question": "1+1", "solution": "2", "target": "3"}])
    settings, form = SftConfig(answer_key="solution"), DataConfig(prompt_key="question")
    assert trained_texts(open_rows(path, tokenizer, settings, form), tokenizer) == ["2<|im_end|>"]
    path = write(tmp_path / "b.jsonl", [{"chat": CHAT, "messages": CHAT[:3]}])
    data = open_rows(path, tokenizer, SftConfig(chat_key="chat"))
    assert trained_texts(data, tokenizer) == ["2<|im_end|>", "55<|im_end|>"]
    settings = SftConfig(chat_key="chat", answer_key="solution")
    with pytest.raises(DataError, match=r"expected chat, or question with one of solution; sft.chat_key, data.prompt"):
        open_rows(write(path, [{"messages": CHAT}]), tokenizer, settings, form)


@pytest.mark.parametrize(
    ("row", "system_prompt", "expected"),
    [
        ({"messages": CHAT[1:], "system": "s"}, None, "s"),
        ({"messages": CHAT[1:]}, "s", "s"),
        ({"prompt": "1+1", "target": "2"}, "t", "t"),
        ({"messages": CHAT[1:], "system": "s"}, "t", "s"),
        ({"messages": CHAT}, "t", "s"),
    ],
    ids=["column", "setting", "prompt and answer", "column before setting", "own turn before setting"],
)
def test_system_prompts(
    row: dict[str, Any],
    system_prompt: str | None,
    expected: str,
    tokenizer: PreTrainedTokenizerBase,
    tmp_path: Path,
) -> None:
    path = write(tmp_path / "a.jsonl", [row])
    data = open_rows(path, tokenizer, form=DataConfig(system_prompt=system_prompt))
    assert tokenizer.decode(data[0].token_ids).startswith(f"<|im_start|>system\n{expected}<|im_end|>\n<|im_start|>user")
    assert trained_texts(data, tokenizer)[0] == "2<|im_end|>"


def test_a_row_that_the_template_refuses_is_named(tmp_path: Path) -> None:
    tokenizer = make_byte_tokenizer()
    tokenizer.chat_template = (
        "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system turns') }}{% endif %}" + FORGETFUL
    )
    path = write(tmp_path / "a.jsonl", [{"messages": CHAT[1:]}, {"messages": CHAT}])
    for train_on in ("all", "every_token"):
        with pytest.raises(DataError, match=r"a\.jsonl row 1: the chat template refuses .*: no system turns; correct"):
            open_rows(path, tokenizer, SftConfig(train_on=train_on))


def test_a_tool_turn_is_read_but_not_trained(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    chat = [*CHAT[1:3], {"role": "tool", "content": "2"}, CHAT[4]]
    data = open_rows(write(tmp_path / "a.jsonl", [{"messages": chat}]), tokenizer)
    assert "tool\n2<|im_end|>" in tokenizer.decode(data[0].token_ids)
    assert trained_texts(data, tokenizer) == ["2<|im_end|>", "55<|im_end|>"]


def test_demonstrations_over_a_limit(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [demonstration("1", "22"), demonstration("333", "4444")])
    with pytest.raises(DataError, match=r"a\.jsonl row 1: the demonstration has 5 tokens, rollout.max_resp\w+ is 4"):
        SftDataset([path], tokenizer, max_prompt_tokens=100, max_response_tokens=4)
    with pytest.raises(DataError, match=r"a\.jsonl row 1: the prompt has 11 tokens, data.max_prompt_tokens is 10"):
        SftDataset([path], tokenizer, max_prompt_tokens=10, max_response_tokens=5)
    drop = SftConfig(on_long="drop")
    data = SftDataset([path], tokenizer, max_prompt_tokens=10, max_response_tokens=5, settings=drop)
    assert (len(data), data.num_dropped) == (1, 1)
    with pytest.raises(DataError, match=r"all 2 rows are over data.max_prompt_tokens=1 or rollout.max_resp"):
        SftDataset([path], tokenizer, max_prompt_tokens=1, max_response_tokens=5, settings=drop)


def test_cut_rows_keep_their_beginning(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [demonstration("1", "22"), demonstration("333", "4444")])
    cut = SftConfig(on_long="cut")
    # The second row's prompt has 11 tokens, its answer 5 with the end token.
    data = SftDataset([path], tokenizer, max_prompt_tokens=11, max_response_tokens=3, settings=cut)
    assert (len(data), data.num_cut, data.num_dropped) == (2, 1, 0)
    assert trained_texts(data, tokenizer, 0) == ["22<|im_end|>"]
    assert trained_texts(data, tokenizer, 1) == ["444"]
    # A prompt that is too long leaves nothing to train on.
    data = SftDataset([path], tokenizer, max_prompt_tokens=10, max_response_tokens=3, settings=cut)
    assert (len(data), data.num_cut, data.num_dropped) == (1, 0, 1)


@pytest.mark.parametrize(
    ("template", "answers"),
    [
        (GEMMA, ["2<end_of_turn>", "55<end_of_turn>"]),
        (MISTRAL, [" 2<|im_end|>", " 55<|im_end|>"]),
    ],
    ids=["Gemma", "Mistral"],
)
def test_templates_that_mark_answers_in_their_own_way(template: str, answers: list[str], tmp_path: Path) -> None:
    tokenizer = make_byte_tokenizer()
    tokenizer.add_tokens([AddedToken("<end_of_turn>", special=True, normalized=False)])
    tokenizer.chat_template = template
    path = write(tmp_path / "a.jsonl", [{"messages": CHAT[1:]}, {"prompt": "1+1", "response": "2 \n"}])
    data = open_rows(path, tokenizer)
    assert trained_texts(data, tokenizer) == answers
    # The tokens are those of the whole chat, which transformers makes.
    whole = tokenizer.apply_chat_template(CHAT[1:], tokenize=False)
    assert data[0].token_ids.tolist() == tokenizer(whole.rstrip(), add_special_tokens=False)["input_ids"]
    # A single answer ends in the same way.
    assert [text.replace(" \n", "") for text in trained_texts(data, tokenizer, 1)] == answers[:1]
    each = open_rows(path, tokenizer, SftConfig(train_on="each"))
    assert [trained_texts(each, tokenizer, i) for i in range(2)] == [[answer] for answer in answers]
