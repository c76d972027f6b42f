"""Columns besides the turns mean the same to every command, and prompts end where the assistant speaks."""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from transformers import PreTrainedTokenizerBase

from megarl.config.algo import DemonstrationConfig
from megarl.config.schema import DataConfig, EnvironmentConfig, SftConfig
from megarl.data.demonstrations import SftDataset
from megarl.data.files import RowFiles
from megarl.data.preferences import PreferenceDataset, ResponsePairDataset
from megarl.data.prompts import PromptDataset
from megarl.errors import DataError

# The first sequence of tokens that a command reads from a file.
Reader = Callable[[Path, PreTrainedTokenizerBase, DataConfig], list[int]]


def read_prompt(path: Path, tokenizer: PreTrainedTokenizerBase, form: DataConfig) -> list[int]:
    return list(PromptDataset([path], tokenizer, form)[0].token_ids)


def read_chat(path: Path, tokenizer: PreTrainedTokenizerBase, form: DataConfig) -> list[int]:
    data = SftDataset([path], tokenizer, max_prompt_tokens=400, max_response_tokens=99, form=form)
    return list(data[0].token_ids)


def read_responses(path: Path, tokenizer: PreTrainedTokenizerBase, form: DataConfig) -> list[int]:
    data = ResponsePairDataset(
        [path], tokenizer, max_prompt_tokens=400, max_response_tokens=99, on_long="error", form=form
    )
    return list(data.rows([0])[0].token_ids)


def read_pair(path: Path, tokenizer: PreTrainedTokenizerBase, form: DataConfig) -> list[int]:
    data = PreferenceDataset([path], tokenizer, max_tokens=500, on_long="error", form=form)
    return list(data.rows([0])[0].token_ids)


PAIR = {"chosen": "2", "rejected": "3"}
READERS: dict[str, tuple[Reader, dict[str, Any]]] = {
    "train": (read_prompt, {"data_source": "s", "reward_model": {"ground_truth": "2"}}),
    "sft": (read_chat, {"target": "2"}),
    "train-preference": (read_responses, PAIR),
    "train-reward": (read_pair, PAIR),
}
TOOLS = [{"type": "function", "function": {"name": "add"}}]
REFUSED = {
    "tools": TOOLS,
    "functions": json.dumps(TOOLS),
    "tool_list": ["add"],
    "available_tools": TOOLS,
    "images": ["a.png"],
    "image": {"path": "a.png"},
    "image_path": "a.png",
    "image_url": "file:a.png",
    "image_paths": ["a.png"],
    "images_base64": ["iVBORw0KGgo="],
    "tool_schemas": TOOLS,
    "tools_json": json.dumps(TOOLS),
    "multi_modal_data": {"image": ["a.png"]},
    "videos": ["a.mp4"],
    "audio": "a.wav",
    "chat_template_kwargs": {"enable_thinking": False},
    "enable_thinking": False,
    "documents": [{"title": "Sums", "text": "1+1 is 2"}],
    "history": [["1+0", "1"]],
    "system_prompt": "Be brief.",
    "agent_name": "tool_agent",
}
# What only completes a prompt beside a column of this name.
COMPLETING = {"instruction": ("input", "context"), "question": ("context", "choices", "options")}

TURN_KEYS = {
    "tool_calls": [{"function": {"name": "add", "arguments": {"a": 1}}}],
    "images": ["a.png"],
    "audio": {"id": "a"},
    "documents": ["1+1 is 2"],
    "tools": TOOLS,
    "thought": "1+1",
    "reasoning_details": [{"text": "1+1"}],
    "refusal": "No.",
    "channel": "analysis",
    "recipient": "functions.add",
    "prefix": True,
}
SYSTEM_TURN = "<|im_start|>system\nBe brief.<|im_end|>\n"


def written(path: Path, row: dict[str, Any]) -> Path:
    path.write_text(json.dumps(row) + "\n")
    return path


@pytest.fixture(params=READERS)
def command(request: pytest.FixtureRequest) -> tuple[Reader, dict[str, Any]]:
    return READERS[request.param]


def test_columns_that_nobody_reads_are_refused(
    command: tuple[Reader, dict[str, Any]], tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    (read, row), form, path = command, DataConfig(), tmp_path / "x.jsonl"
    # One look at the files serves all commands.
    for name in REFUSED if read is read_prompt else ("tools", "images"):
        for empty in (None, "", [], {}, " [] ", *["single_turn_agent"][: name == "agent_name"]):
            read(written(path, {**row, "prompt": "1+1", name: empty}), tokenizer, form)
        with pytest.raises(DataError, match=rf"x\.jsonl row 0: {name} is not read here; "):
            read(written(path, {**row, "prompt": "1+1", name: REFUSED[name]}), tokenizer, form)


@pytest.mark.parametrize("name", COMPLETING)
def test_columns_that_complete_a_prompt_are_refused(
    name: str, command: tuple[Reader, dict[str, Any]], tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    (read, row), form, path = command, DataConfig(prompt_key=name), tmp_path / "x.jsonl"
    for each in COMPLETING[name]:
        plain = read(written(path, {**row, "prompt": "1+1", each: "Hello"}), tokenizer, DataConfig())
        assert read(written(path, {**row, name: "1+1", each: ""}), tokenizer, form) == plain
        with pytest.raises(DataError, match=rf"x\.jsonl row 0: {each} is not read here; write it into the prompt, or "):
            read(written(path, {**row, name: "1+1", each: "Hello"}), tokenizer, form)


def test_what_a_turn_holds_besides_its_text_is_refused(
    command: tuple[Reader, dict[str, Any]], tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    (read, row), path, turn = command, tmp_path / "x.jsonl", {"role": "user", "content": "1+1"}
    for key in TURN_KEYS if read is read_prompt else ("tool_calls",):
        plain = [{"channel": "final", "recipient": "all"}.get(key)]
        for empty in (None, False, "", *filter(None, plain)):
            read(written(path, {**row, "prompt": [{**turn, key: empty}]}), tokenizer, DataConfig())
        with pytest.raises(DataError, match=rf"x\.jsonl row 0: prompt\[0\]: {key} is not read here; "):
            read(written(path, {**row, "prompt": [{**turn, key: TURN_KEYS[key]}]}), tokenizer, DataConfig())


NAMED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}{% if m.name %} {{ m.name }}{% endif %}{{ '\n' + m.content }}"
    "{% if m.tool_call_id %}[{{ m.tool_call_id }}]{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def test_names_and_calls_of_turns_are_written_as_the_template_says(
    tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    (read, row), path, form = READERS["train"], tmp_path / "x.jsonl", DataConfig()
    turn = {"role": "user", "content": "1+1"}
    result = {"role": "tool", "content": "2", "name": "add", "tool_call_id": "c7"}
    plain = read(written(path, {**row, "prompt": [turn, {"role": "tool", "content": "2"}]}), tokenizer, form)
    # What a template shows of tools is the model's own form.
    assert read(written(path, {**row, "prompt": [turn, result]}), tokenizer, form) == plain
    for name in ("system", "user"):
        chat = [{**turn, "role": name, "name": "Ann"}, turn]
        with pytest.raises(DataError, match=r"x\.jsonl row 0.*: turn 0: the chat template leaves out name, 'Ann', so"):
            read(written(path, {**row, "prompt": chat}), tokenizer, form)
    with pytest.raises(DataError, match=r"prompt\[1\]: the policy writes no name before an answer; remove name"):
        read(
            written(path, {**row, "prompt": [turn, {**turn, "role": "assistant", "name": "b"}, turn]}), tokenizer, form
        )
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = NAMED
    ids = read(written(path, {**row, "prompt": [{**turn, "name": "Ann"}, result]}), tokenizer, form)
    text = str(tokenizer.decode(ids))
    assert text.startswith("<|im_start|>user Ann\n1+1<|im_end|>\n<|im_start|>tool add\n2[c7]<|im_end|>\n")


def test_prompts_that_ask_for_tools_need_an_environment(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    """Verl's rows name tools in extra_info alone, too."""
    row = READERS["train"][1] | {
        "prompt": "1+1",
        "extra_info": {"need_tools_kwargs": True, "tools_kwargs": {"add": {}}},
    }
    path = written(tmp_path / "x.jsonl", row)
    with pytest.raises(
        DataError, match=r"x\.jsonl row 0: extra_info: need_tools_kwargs asks for tools; set environment"
    ):
        read_prompt(path, tokenizer, DataConfig())
    settings = EnvironmentConfig(default="adder")
    assert len(PromptDataset([path], tokenizer, DataConfig(), environment=settings)) == 1


def test_every_command_reads_chats_in_sharegpts_form(
    command: tuple[Reader, dict[str, Any]], tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    (read, row), path, form = command, tmp_path / "x.jsonl", DataConfig()
    plain = read(written(path, {**row, "prompt": "1+1"}), tokenizer, form)
    assert read(written(path, {**row, "prompt": [{"from": "human", "value": "1+1"}]}), tokenizer, form) == plain
    with pytest.raises(DataError, match=r"prompt\[0\]: from is 'bing', expected one of"):
        read(written(path, {**row, "prompt": [{"from": "bing", "value": "1+1"}]}), tokenizer, form)


def test_no_command_reads_blank_questions(
    command: tuple[Reader, dict[str, Any]], tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    (read, row), system = command, {"role": "system", "content": "Be brief."}
    for turns in ([], [system]):
        path = written(tmp_path / "x.jsonl", {**row, "prompt": [*turns, {"role": "user", "content": " \n"}]})
        with pytest.raises(DataError, match=r"x\.jsonl row 0: the turns before the answer are blank, expected a quest"):
            read(path, tokenizer, DataConfig())


IMAGE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
# By what a column of Parquet holds: its type, what counts as nothing, and a value.
# By what a column of Parquet holds: its type, what counts as nothing, and a value.
KINDS: dict[str, tuple[pa.DataType, list[Any], Any]] = {
    "images": (pa.list_(IMAGE), [None, []], [{"bytes": b"\x89PNG", "path": None}]),
    "an image": (IMAGE, [None], {"bytes": None, "path": "a.png"}),
    "bytes": (pa.list_(pa.binary()), [None, []], [b"\xff"]),
    "names": (pa.string(), [None, "", " [] ", "{}"], "a.png"),
    "a map": (pa.map_(pa.string(), pa.string()), [None, []], [("a", "b")]),
    "maps": (pa.list_(pa.struct([("of", pa.map_(pa.string(), pa.string()))])), [None, []], [{"of": [("a", "b")]}]),
    "a switch": (pa.bool_(), [None], False),
    "nothing": (pa.null(), [None], None),
}


@pytest.mark.parametrize("kind", KINDS)
def test_unread_columns_of_any_type_are_found_in_parquet(kind: str, tmp_path: Path) -> None:
    type_, empty, value = KINDS[kind]
    path, values = tmp_path / "x.parquet", [empty[i % len(empty)] for i in range(200)]
    for number in (-1, 137):
        if number >= 0:
            values[number] = value
        pq.write_table(pa.table({"prompt": ["q"] * 200, "images": pa.array(values, type_)}), path, row_group_size=90)
        if number < 0 or value is None:
            assert list(RowFiles([path], columns=("prompt",))) == [{"prompt": "q"}] * 200
        else:
            with pytest.raises(DataError, match=r"x\.parquet row 137: images is not read here; "):
                RowFiles([path], columns=("prompt",))


def test_images_are_not_read_before_they_are_refused(tmp_path: Path) -> None:
    path, images = tmp_path / "x.parquet", [[{"bytes": bytes([i]) * 100_000, "path": None}] for i in range(100)]
    pq.write_table(pa.table({"prompt": ["q"] * 100, "images": pa.array(images, pa.list_(IMAGE))}), path)
    before, pool = pa.default_memory_pool(), pa.proxy_memory_pool(pa.system_memory_pool())
    pa.set_memory_pool(pool)
    try:
        with pytest.raises(DataError, match=r"row 0: images is not read here; "):
            RowFiles([path], columns=("prompt",))
    finally:
        pa.set_memory_pool(before)
    assert 0 < pool.max_memory() < 1_000_000


def test_a_column_that_a_setting_names_is_read(tmp_path: Path) -> None:
    path = written(tmp_path / "x.jsonl", {"image": "a picture in words"})
    assert list(RowFiles([path], columns=("image",))) == [{"image": "a picture in words"}]


def test_the_column_of_prompts_has_the_name_that_a_setting_gives_it(
    command: tuple[Reader, dict[str, Any]], tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    (read, row), path = command, tmp_path / "x.jsonl"
    plain = read(written(path, {**row, "prompt": "1+1"}), tokenizer, DataConfig())
    named = DataConfig(prompt_key="question")
    assert read(written(path, {**row, "question": "1+1", "prompt": "2+2"}), tokenizer, named) == plain
    with pytest.raises(DataError, match="question"):
        read(written(path, {**row, "prompt": "2+2"}), tokenizer, named)


def test_system_turns_of_columns_and_settings(
    command: tuple[Reader, dict[str, Any]], tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    read, row = command
    path, row = tmp_path / "x.jsonl", {**row, "prompt": "1+1"}

    def text(row: dict[str, Any], form: DataConfig | None = None) -> str:
        return str(tokenizer.decode(read(written(path, row), tokenizer, form or DataConfig())))

    plain, system = text(row), {"role": "system", "content": "Be brief."}
    assert "system" not in plain
    assert text({**row, "system": "Be brief."}, DataConfig(system_prompt="Be long.")) == SYSTEM_TURN + plain
    assert text(row, DataConfig(system_prompt="Be brief.")) == SYSTEM_TURN + plain
    turns = [system, {"role": "user", "content": "1+1"}]
    assert text({**row, "prompt": turns, "system": "Be brief."}) == SYSTEM_TURN + plain
    with pytest.raises(DataError, match=r"row 0: system: got 'Be long\.', but the chat begins with 'Be b"):
        text({**row, "prompt": turns, "system": "Be long."})


def test_prompts_do_not_end_with_an_answer(
    command: tuple[Reader, dict[str, Any]], tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    read, row = command
    chat = [{"role": "user", "content": "1+1"}, {"role": "assistant", "content": "It is 2"}]
    path = written(tmp_path / "x.jsonl", {**row, "prompt": chat})
    with pytest.raises(DataError, match=r"row 0: .* ends with the assistant's turn 'It is 2', .*data\.prefill=true"):
        read(path, tokenizer, DataConfig())


def test_a_prefill_is_continued(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    row = READERS["train"][1] | {
        "prompt": [{"role": "user", "content": "1+1"}, {"role": "assistant", "content": "1 + 1 ="}],
        "target": [{"role": "assistant", "content": " 2"}],
    }
    plain = {**row, "prompt": "1+1"}
    path = tmp_path / "x.jsonl"
    path.write_text("".join(json.dumps(each) + "\n" for each in (plain, row, plain)))
    data = PromptDataset([path], tokenizer, DataConfig(prefill=True), demonstrations=DemonstrationConfig())
    opening = "<|im_start|>user\n1+1<|im_end|>\n<|im_start|>assistant\n"
    texts = [tokenizer.decode(list(data[i].token_ids)) for i in range(3)]
    assert texts == [opening, opening + "1 + 1 =", opening]
    assert tokenizer.decode(list(data[1].demonstration_ids)) == " 2<|im_end|>"


def test_whole_chats_are_looked_through(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    """Every command refuses a turn that its template leaves out, also one before the first of several answers."""
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role in ['user', 'assistant'] %}<|im_start|>{{ m.role }}\n{{ m.content }}"
        "<|im_end|>\n{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    turns = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "1+1"}]
    for read, row in READERS.values():
        path = written(tmp_path / "x.jsonl", {**row, "prompt": turns})
        with pytest.raises(DataError, match=r"row 0: turn 0: .* leaves out the text of the role 'developer'"):
            read(path, tokenizer, DataConfig())
    answer = {"role": "assistant", "content": "2"}
    path = written(tmp_path / "x.jsonl", {"messages": [turns[1], answer, *turns, answer]})
    for train_on in ("all", "each", "last", "every_token"):
        with pytest.raises(DataError, match=r"row 0: turn 2: .* leaves out the text of the role 'developer'"):
            SftDataset(
                [path],
                tokenizer,
                max_prompt_tokens=400,
                max_response_tokens=99,
                settings=SftConfig(train_on=train_on),
            )
