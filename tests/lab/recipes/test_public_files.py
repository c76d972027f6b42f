"""Published files that need a conversion."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megarl.config.schema import DataConfig
from megarl.data.files import RowFiles
from megarl.data.records import parse_prompt, prompt_columns
from megarl.errors import DataError
from megarl.rewards import score
from megarl_lab.recipes.public_files import convert_countdown, write_distinct

DAPO = {
    "data_source": "math_dapo",
    "prompt": [{"content": "Solve x = 34.", "role": "user"}],
    "ability": "MATH",
    "reward_model": {"ground_truth": "34", "style": "rule-lighteval/MATH_v2"},
    "extra_info": {"index": "9a9b6eb4"},
}


def test_countdown(tmp_path: Path) -> None:
    pq.write_table(pa.Table.from_pylist([{"target": 98, "nums": [44, 19, 35]}]), tmp_path / "train.parquet")
    convert_countdown(tmp_path / "train.parquet", tmp_path / "out/train.parquet")
    [row] = RowFiles([tmp_path / "out/train.parquet"], columns=prompt_columns(DataConfig()))
    record = parse_prompt(row, "here")
    assert "[44, 19, 35]" in record.messages[0].content
    assert "98" in record.messages[0].content
    assert json.loads(record.ground_truth) == {"numbers": [44, 19, 35], "target": 98}
    assert score(record.data_source, "<answer>44 + 19 + 35</answer>", record.ground_truth, {}).correct


def test_a_bad_countdown_row_is_named(tmp_path: Path) -> None:
    file = tmp_path / "train.jsonl"
    file.write_text('{"target": 98, "nums": [44]}\n{"target": "98", "nums": [44]}\n')
    with pytest.raises(DataError, match=r"train.jsonl row 1: got .*, expected integers"):
        convert_countdown(file, tmp_path / "out.parquet")


def test_each_prompt_once_with_all_columns(tmp_path: Path) -> None:
    other = {**DAPO, "prompt": [{"content": "Solve x = 35.", "role": "user"}], "extra_info": {"index": "77"}}
    rows = [DAPO, {**DAPO, "extra_info": {"index": "again"}}, other]
    for name, part in (("a", rows), ("b", rows[::-1])):
        pq.write_table(pa.Table.from_pylist(part), tmp_path / f"{name}.parquet")
    left_out = write_distinct([tmp_path / "a.parquet", tmp_path / "b.parquet"], tmp_path / "out/all.parquet")
    assert left_out == 4
    assert pq.read_table(tmp_path / "out/all.parquet").to_pylist() == [DAPO, other]


def test_files_of_other_columns_are_refused(tmp_path: Path) -> None:
    pq.write_table(pa.Table.from_pylist([DAPO]), tmp_path / "a.parquet")
    pq.write_table(pa.Table.from_pylist([{"prompt": "Solve."}]), tmp_path / "b.parquet")
    pq.write_table(pa.Table.from_pylist([{"input": "Solve."}]), tmp_path / "c.parquet")
    with pytest.raises(DataError, match=r"b.parquet: has columns \['prompt'\], expected those of .*a.parquet"):
        write_distinct([tmp_path / "a.parquet", tmp_path / "b.parquet"], tmp_path / "out.parquet")
    with pytest.raises(DataError, match=r"c.parquet: column 'prompt' is missing; there are: input"):
        write_distinct([tmp_path / "c.parquet"], tmp_path / "out.parquet")
