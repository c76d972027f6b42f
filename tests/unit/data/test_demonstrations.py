"""Rows of supervised training: the forms of chats, which tokens are trained, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from megarl.config.schema import DataConfig, SftConfig
from megarl.data.demonstrations import SftDataset
from megarl.errors import DataError
from megarl_lab.recipes.tiny_model import make_byte_tokenizer


def demonstration(question: str, answer: str) -> dict[str, Any]:
    return {
        "prompt": [{"role": "user", "content": question}],
        "target": [{"role": "assistant", "content": answer}],
    }


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


@pytest.mark.parametrize(
    "answer",
    [
        {"target": [{"role": "assistant", "content": "2"}]},
        {"response": "2"},
        {"completion": [{"role": "assistant", "content": "2"}]},
    ],
    ids=["LUFFY", "verl", "TRL"],
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


@pytest.mark.parametrize(
    "mark",
    [
        *({name: False} for name in ("train", "loss")),
        *({name: 0} for name in ("weight", "loss_mask")),
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


def test_a_template_that_rewrites_answers_is_an_error_with_its_remedy(tmp_path: Path) -> None:
    tokenizer = make_byte_tokenizer()
    tokenizer.chat_template = FORGETFUL
    chat = [turn | {"content": "<think>a</think>2"} if turn["content"] == "2" else turn for turn in CHAT]
    path = write(tmp_path / "a.jsonl", [{"messages": CHAT}, {"messages": chat}])
    with pytest.raises(DataError, match=r"a\.jsonl row 1: before the next answer, .*turn 2 .* set sft.train_on to"):
        open_rows(path, tokenizer)
    data = open_rows(path, tokenizer, SftConfig(train_on="last"))
    assert trained_texts(data, tokenizer, 1) == ["55<|im_end|>"]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"messages": CHAT[:2]}, r"row 0: the row has roles \['system', 'user'\], expected an answer"),
        ({"conversations": [{"from": "bird", "value": "x"}]}, r"conversations\[0\]: from is 'bird', expected one of"),
        (
            {"prompt": "1+1"},
            r"got columns \['prompt'\], expected messages, conversations, or prompt with",
        ),
        ({"messages": [*CHAT[:2], {"role": "assistant", "content": "2<|im_end|>3"}]}, "turn 2: the target is"),
        ({"messages": "hello"}, r"messages is str, expected a list"),
        (
            {"messages": [*CHAT[:2], CHAT[2] | {"weight": 0.5}]},
            r"messages\[2\]: weight is 0.5, expected true or false, or 1 or 0",
        ),
        (
            {"messages": [*CHAT[:2], CHAT[2] | {"tool_calls": [{"name": "add"}]}]},
            r"row 0: messages\[2\]: tool_calls is not read here; write it into the turn's text",
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
