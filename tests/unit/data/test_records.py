"""What rows mean, and what is said of bad ones."""

from pathlib import Path
from typing import Any

import pytest

from megarl.config.schema import DataConfig, SftConfig
from megarl.data.files import RowFiles
from megarl.data.records import (
    demonstration_columns,
    parse_demonstration,
    parse_prompt,
    prompt_columns,
)
from megarl.errors import DataError
from megarl_lab.recipes.public_files import write_parquet
from tests.helpers.public_rows import PUBLIC_FORMS

ROW: dict[str, Any] = {
    "prompt": [{"role": "system", "content": "be brief"}, {"role": "user", "content": "1+1=?"}],
    "data_source": "megarl/sums",
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "2"},
    "extra_info": {"index": 3, "gold_solution": "1+1=2"},
    "target": [{"role": "assistant", "content": "#### 2"}],
}


def test_data_source_is_read_from_the_top_level_first() -> None:
    both = {**ROW, "extra_info": {"data_source": "inner"}}
    assert parse_prompt(both, "here").data_source == "megarl/sums"
    assert parse_prompt({**both, "data_source": None}, "here").data_source == "inner"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompt": []}, "here: prompt is an empty list, expected a list of {role, content}"),
        ({"prompt": None}, "here: prompt is NoneType, expected a list"),
        ({"prompt": ["hi"]}, r"here: prompt\[0\] is str, expected {role, content}"),
        ({"prompt": [{"role": "user"}]}, r"here: prompt\[0\]: content is missing, expected a string"),
        ({"prompt": [{"role": "user", "content": [1]}]}, r"prompt\[0\]: content is \[1\], expected a string"),
        ({"data_source": None, "extra_info": None}, "here: data_source is missing"),
        ({"reward_model": None}, "here: reward_model is NoneType, expected an object"),
        ({"reward_model": {"style": "rule"}}, "here: reward_model: ground_truth is missing"),
        ({"reward_model": {"ground_truth": float("nan")}}, "reward_model: ground_truth is nan, expected text or what"),
        ({"reward_model": {"style": 3, "ground_truth": ""}}, "here: reward_model: style is 3, expected a string"),
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


def test_ground_truths_that_are_no_text_become_json() -> None:
    truths = [72, ["a", "b"], {"target": 98, "numbers": [44], "unit": None}]
    got = [parse_prompt({**ROW, "reward_model": {"ground_truth": truth}}, "here").ground_truth for truth in truths]
    # A null is what Parquet gives a struct without that field.
    assert got == ["72", '["a", "b"]', '{"target": 98, "numbers": [44]}']


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
        [{"role": "assistant", "content": ""}],
        [{"role": "assistant", "content": "x"}, {"role": "user", "content": "y"}],
    ],
)
def test_a_target_is_one_assistant_turn(target: list[dict[str, str]]) -> None:
    with pytest.raises(DataError, match=r"here: target has roles .*, expected one assistant turn"):
        parse_demonstration({**ROW, "target": target}, "here")


def test_parquet_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    plain = {key: value for key, value in ROW.items() if key != "target"}
    write_parquet(path, [ROW, plain])
    files = RowFiles([path], columns=prompt_columns(DataConfig()))
    # Fields that a row left out are gone again, although Parquet stores them as nulls.
    assert [parse_prompt(row, "here") for row in files] == [parse_prompt(ROW, "here")] * 2
    demonstrations = RowFiles([path], columns=demonstration_columns(DataConfig(), SftConfig()))
    assert parse_demonstration(demonstrations[0], "here").messages[-1].content == "#### 2"
    with pytest.raises(DataError, match=r"got columns .*, expected messages, conversations, or prompt with"):
        parse_demonstration(demonstrations[1], "here")


def test_a_judging_model_needs_no_ground_truth() -> None:
    assert parse_prompt({**ROW, "reward_model": {"style": "model"}}, "here").ground_truth == ""
