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

from megarl.config.schema import DataConfig, EnvironmentConfig
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
    "images": ["a.png"],
    "image_url": "file:a.png",
    "tool_schemas": TOOLS,
    "multi_modal_data": {"image": ["a.png"]},
    "videos": ["a.mp4"],
    "chat_template_kwargs": {"enable_thinking": False},
    "documents": [{"title": "Sums", "text": "1+1 is 2"}],
    "history": [["1+0", "1"]],
    "agent_name": "tool_agent",
}
TURN_KEYS = {
    "tool_calls": [{"function": {"name": "add", "arguments": {"a": 1}}}],
    "images": ["a.png"],
    "documents": ["1+1 is 2"],
    "thought": "1+1",
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


IMAGE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
# By what a column of Parquet holds: its type, what counts as nothing, and a value.
KINDS: dict[str, tuple[pa.DataType, list[Any], Any]] = {
    "images": (pa.list_(IMAGE), [None, []], [{"bytes": b"\x89PNG", "path": None}]),
    "an image": (IMAGE, [None], {"bytes": None, "path": "a.png"}),
    "names": (pa.string(), [None, "", " [] ", "{}"], "a.png"),
    "maps": (pa.list_(pa.struct([("of", pa.map_(pa.string(), pa.string()))])), [None, []], [{"of": [("a", "b")]}]),
    "a switch": (pa.bool_(), [None], False),
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
