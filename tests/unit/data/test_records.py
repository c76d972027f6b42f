"""What rows mean, and what is said of bad ones."""

from typing import Any

import pytest

from megarl.config.schema import DataConfig
from megarl.data.records import (
    parse_demonstration,
    parse_prompt,
)
from megarl.errors import DataError
from tests.helpers.public_rows import PUBLIC_FORMS

ROW: dict[str, Any] = {
    "prompt": [{"role": "system", "content": "be brief"}, {"role": "user", "content": "1+1=?"}],
    "data_source": "megarl/sums",
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "2"},
    "extra_info": {"index": 3, "gold_solution": "1+1=2"},
    "target": [{"role": "assistant", "content": "#### 2"}],
}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompt": []}, "here: prompt is an empty list, expected a list of {role, content}"),
        ({"prompt": ["hi"]}, r"here: prompt\[0\] is str, expected {role, content}"),
        ({"prompt": [{"role": "user"}]}, r"here: prompt\[0\]: content is missing, expected a string"),
        ({"prompt": [{"role": "user", "content": [1]}]}, r"prompt\[0\]: content is \[1\], expected a string"),
        ({"data_source": None, "extra_info": None}, "here: data_source is missing"),
        ({"reward_model": {"style": "rule"}}, "here: reward_model: ground_truth is missing"),
        ({"reward_model": {"ground_truth": float("nan")}}, "reward_model: ground_truth is nan, expected text or what"),
        ({"extra_info": 7}, "here: extra_info is int, expected an object"),
    ],
)
def test_bad_prompts_are_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        parse_prompt({**ROW, **change}, "here")


@pytest.mark.parametrize("name", PUBLIC_FORMS)
def test_public_data_is_read_as_it_is(name: str) -> None:
    row, form, expected = PUBLIC_FORMS[name]
    record = parse_prompt(row, "here", form)
    assert [m.role for m in record.messages] == ["user"]
    assert (record.messages[-1].content, record.data_source, record.ground_truth) == expected


def test_a_row_without_label_or_source_names_the_settings() -> None:
    form = DataConfig(prompt_key="input", label_key="label")
    with pytest.raises(DataError, match=r"here: data_source is missing; name the column in data\.source_key"):
        parse_prompt({"input": "1+1", "label": "2"}, "here", form)
    with pytest.raises(DataError, match=r"here: label is missing, expected a ground truth; see data\.label_key"):
        parse_prompt({"input": "1+1"}, "here", form)


@pytest.mark.parametrize(
    "target",
    [
        [{"role": "user", "content": "x"}],
        [{"role": "assistant", "content": "x"}, {"role": "user", "content": "y"}],
    ],
)
def test_a_target_is_one_assistant_turn(target: list[dict[str, str]]) -> None:
    with pytest.raises(DataError, match=r"here: target has roles .*, expected one assistant turn"):
        parse_demonstration({**ROW, "target": target}, "here")


def test_a_judging_model_needs_no_ground_truth() -> None:
    assert parse_prompt({**ROW, "reward_model": {"style": "model"}}, "here").ground_truth == ""
