"""The table and the files of an evaluation."""

from pathlib import Path

import pyarrow.parquet as pq

from megarl.record.rollouts import SourceResult, results_by_source
from megarl.run.evaluation.output import results_lines, write_results
from tests.unit.record.test_answers import answers


def result(name: str, *, error: float | None) -> SourceResult:
    return SourceResult(
        data="val.parquet",
        data_source=name,
        num_prompts=256,
        num_samples=8,
        avg=0.441,
        avg_std_error=error,
        pass_at={1: 0.441, 4: 0.8125},
        maj=0.5,
        greedy=0.05,
        reward=0.441,
        response_tokens=17.25,
        truncated_frac=0.0125,
    )


def test_table() -> None:
    assert results_lines([result("sums", error=0.0124), result("openai/gsm8k", error=None)]) == [
        "data         source        prompts          avg@8  pass@1  pass@4  maj@8  greedy  tokens  truncated",
        "val.parquet  sums              256  0.441 ± 0.012   0.441   0.812  0.500   0.050    17.2       1.2%",
        "val.parquet  openai/gsm8k      256          0.441   0.441   0.812  0.500   0.050    17.2       1.2%",
    ]


def test_answers_that_nobody_could_judge_are_counted() -> None:
    judged = answers("sums", "a", [True, False], greedy=False) + answers("chess", "b", [True], greedy=True)[:1]
    assert [answer.greedy for answer in judged if answer.data_source == "chess"] == [True]
    # Of chess, no sampled answer was judged.
    found = results_by_source(judged, (1,), {("val.parquet", "sums"): 3, ("val.parquet", "chess"): 4})
    header, row = (line.split() for line in results_lines(found))
    assert header[-1] == "unjudged"
    assert (row[1], row[-1]) == ("sums", "3")


def test_files(tmp_path: Path) -> None:
    judged = answers("sums", "a", [True, False], greedy=False)
    results = results_by_source(judged, (1, 2))
    table, samples = write_results(tmp_path, results, judged)
    (row,) = pq.read_table(table).to_pylist()
    assert row == {
        "data": "val.parquet",
        "data_source": "sums",
        "num_prompts": 1,
        "num_samples": 2,
        "avg": 0.5,
        "avg_std_error": None,
        # Neither response states a final answer.
        "maj": 0.0,
        "greedy": 0.0,
        "reward": 0.25,
        "response_tokens": 7.0,
        "truncated_frac": 0.5,
        "pass_at_1": 0.5,
        "pass_at_2": 1.0,
        # No sample is a conversation.
        "turns": None,
        "tool_calls": None,
        "num_unjudged": 0,
    }
    rows = pq.read_table(samples).to_pylist()
    assert [(r["uid"], r["greedy"], r["sample_index"], r["correct"]) for r in rows] == [
        ("a", True, 0, False),
        ("a", False, 0, True),
        ("a", False, 1, False),
    ]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["samples.parquet", "table.parquet"]
