"""Records that take any text: what rewards, judges, tools and environments say never ends a run."""

import json
from dataclasses import replace
from datetime import date
from pathlib import Path

import numpy as np

from megarl.record.json_lines import append_lines, open_lines
from megarl.record.metrics import JsonlSink, MetricsLogger, read_metrics
from megarl.record.problems import ProblemRecord, append_problems, read_problems
from megarl.record.trackers import TensorBoardSink
from megarl.rollout.replay import read_record, write_record
from megarl.types import Episode, RolloutBatch
from megarl.types.judged import Trouble
from tests.helpers.reward_items import item
from tests.helpers.rollouts import random_rollout

HALF = "so \ud83d"


def test_names_of_metrics(tmp_path: Path) -> None:
    sinks = [JsonlSink(tmp_path / "metrics.jsonl"), TensorBoardSink(tmp_path / "tensorboard")]
    with MetricsLogger(sinks) as logger:
        logger.log(1, {f"reward/{HALF}": 0.5, "a\0b": 1.0})
    assert read_metrics(tmp_path / "metrics.jsonl")[0].metrics == {"reward/so \ufffd": 0.5, "a\0b": 1.0}


def test_reasons_and_outputs_of_judges(tmp_path: Path) -> None:
    trouble = Trouble(
        item=item("p", f"{HALF}\0", HALF), outcome="failed", reason=HALF, output=f"{HALF} \ud83d\ude00", judge="rule"
    )
    append_problems(tmp_path / "problems.jsonl", [ProblemRecord.of(trouble, step=1, phase="train")])
    (record,) = read_problems(tmp_path / "problems.jsonl")
    assert (record.reason, record.output, record.response) == ("so \ufffd", "so \ufffd 😀", "so \ufffd\0")


def test_lines_of_anything(tmp_path: Path) -> None:
    with open_lines(tmp_path / "x.jsonl") as file:
        append_lines(file, [{HALF: np.float32(0.5), "when": date(2026, 1, 2), "set": {1}}])
    assert json.loads((tmp_path / "x.jsonl").read_text()) == {"so \ufffd": 0.5, "when": "2026-01-02", "set": "{1}"}


def test_recorded_rollouts(tmp_path: Path) -> None:
    usual = random_rollout()
    sample = replace(usual.samples[0], episode=Episode(environment="e", details={HALF: {1}, "n": np.int64(2)}))
    prompt = replace(usual.prompts[sample.uid], extra_info={"day": date(2026, 1, 2), "image": b"\xff"})
    write_record(tmp_path / "r.parquet", RolloutBatch(prompts={sample.uid: prompt}, samples=(sample,)))
    read = read_record(tmp_path / "r.parquet")
    assert read.samples[0].episode is not None
    assert read.samples[0].episode.details == {"so \ufffd": "{1}", "n": 2}
    assert read.prompts[sample.uid].extra_info == {"day": "2026-01-02", "image": "b'\\xff'"}
