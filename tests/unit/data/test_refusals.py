"""Chat templates that refuse chats: the file and row, or the setting, is named in one line."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from megarl.config.schema import DataConfig
from megarl.data.chat import TemplateRefusal, render_chats, require_system_turn
from megarl.data.demonstrations import SftDataset
from megarl.data.preferences import PreferenceDataset, ResponsePairDataset
from megarl.data.prompts import PromptDataset
from megarl.data.turns import InterTurnTokens
from megarl.errors import ConfigError, DataError
from megarl.types import Message

TURN = "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
OPEN = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
# As Gemma's: no system turns, and turns alternate.
STRICT = (
    "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate') }}{% endif %}" + TURN + "{% endfor %}" + OPEN
)
NO_SYSTEM = "{% for message in messages if message['role'] != 'system' %}" + TURN + "{% endfor %}" + OPEN
NO_TOOL = "{% for message in messages if message['role'] != 'tool' %}" + TURN + "{% endfor %}" + OPEN
USER, AGAIN = {"role": "user", "content": "1+1=?"}, {"role": "user", "content": "Add:"}
SYSTEM, ANSWER = {"role": "system", "content": "You add."}, {"role": "assistant", "content": "2"}
LABEL = {"data_source": "mine", "reward_model": {"ground_truth": "2"}}


def write(path: Path, *rows: dict[str, Any]) -> list[Path]:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [path]


@pytest.mark.parametrize(
    ("turns", "roles", "said"),
    [
        ([SYSTEM, USER], "'system', 'user'", "System role not supported"),
        ([AGAIN, USER], "'user', 'user'", "Conversation roles must alternate"),
    ],
)
def test_every_kind_of_file_names_the_row(
    tokenizer: PreTrainedTokenizerBase, tmp_path: Path, turns: list[dict[str, str]], roles: str, said: str
) -> None:
    tokenizer.chat_template = STRICT
    expected = rf"^\S+x\.jsonl row 1(: chosen)?: the chat template refuses the roles \[{roles}[^]]*\]: {said}; correct"
    files = write(tmp_path / "x.jsonl", {**LABEL, "prompt": [USER]}, {**LABEL, "prompt": turns})
    with pytest.raises(DataError, match=expected):
        PromptDataset(files, tokenizer, DataConfig(max_prompt_tokens=100))
    files = write(tmp_path / "x.jsonl", {"messages": [USER, ANSWER]}, {"messages": [*turns, ANSWER]})
    with pytest.raises(DataError, match=expected):
        SftDataset(files, tokenizer, max_prompt_tokens=100, max_response_tokens=100)
    pair = {"chosen": "2", "rejected": "3"}
    files = write(tmp_path / "x.jsonl", {**pair, "prompt": [USER]}, {**pair, "prompt": turns})
    with pytest.raises(DataError, match=expected):
        PreferenceDataset(files, tokenizer, max_tokens=100, on_long="error")
    with pytest.raises(DataError, match=expected):
        ResponsePairDataset(files, tokenizer, max_prompt_tokens=100, max_response_tokens=100, on_long="error")


@pytest.mark.parametrize(
    ("expression", "said"),
    [
        ("'a' + 1", "TypeError: "),
        ("messages[0].content.missing.more", "'str object' has no attribute 'missing'"),
        ("1 // (messages | length - 2)", "ZeroDivisionError: "),
        ("''.__class__.mro()", "access to attribute '__class__' of 'str' object is unsafe"),
        ("strftime_now('%d' % 1 + 1)", "TypeError: "),
        ("'x'.encode('nope')", "LookupError: unknown encoding: nope"),
        ("'%(x)s' % {}", "KeyError: 'x'"),
        ("raise_exception('two\\nlines')", "two lines;"),
    ],
)
def test_whatever_an_expression_raises_is_a_refusal(
    tokenizer: PreTrainedTokenizerBase, expression: str, said: str
) -> None:
    tokenizer.chat_template = "{% if messages | length == 2 %}{{ " + expression + " }}{% endif %}" + OPEN
    chats = [[Message(**USER)], [Message(**USER), Message(**ANSWER)]]
    refused = r"^b: the chat template refuses the roles \['user', 'assistant'\]: "
    with pytest.raises(TemplateRefusal, match=refused + said):
        render_chats(tokenizer, chats, places=["a", "b"])


def test_the_setting_is_named_that_makes_a_system_turn(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    form = DataConfig(system_prompt="You add.", max_prompt_tokens=100)
    prompts = write(tmp_path / "x.jsonl", {**LABEL, "prompt": [USER]})
    chats = write(tmp_path / "y.jsonl", {"messages": [USER, ANSWER]})
    for template, said in (
        (STRICT, "refuses a system turn: System role not supported"),
        (NO_SYSTEM, "leaves out system"),
    ):
        tokenizer.chat_template = template
        with pytest.raises(ConfigError, match=rf"^data\.system_prompt: the chat template {said}.*; write it into user"):
            PromptDataset(prompts, tokenizer, form)
        with pytest.raises(ConfigError, match=r"^data\.system_prompt: the chat template"):
            SftDataset(chats, tokenizer, max_prompt_tokens=100, max_response_tokens=100, form=form)
        with pytest.raises(ConfigError, match=r"^rewards\.judges\.j\.system: the chat template"):
            require_system_turn(tokenizer, "Judge.", "rewards.judges.j.system")


def test_replies_of_tools_are_tried_before_a_run(tokenizer: PreTrainedTokenizerBase) -> None:
    InterTurnTokens(tokenizer).require_reply("tool")
    for template, said in ((STRICT, "the chat template refuses replies of the roles"), (NO_TOOL, "leaves out turns")):
        tokenizer.chat_template = template
        with pytest.raises(ConfigError, match=rf"^environment\.tool_role: .*{said}.*set .*user"):
            InterTurnTokens(tokenizer).require_reply("tool")
        InterTurnTokens(tokenizer).require_reply("user")


def test_half_an_emoji_of_a_tool_reaches_the_policy_mended(tokenizer: PreTrainedTokenizerBase) -> None:
    inter_turn = InterTurnTokens(tokenizer)
    ids = inter_turn.between([Message(role="tool", content="so \ud83d")], last_token=0)
    assert "so \ufffd" in tokenizer.decode(ids)
