"""Rules of teachers and of distillation, by their messages; and who teaches which samples."""

import re
from typing import Any

import pytest

from megarl.config import Config, from_dict
from megarl.config.check import check_train
from megarl.config.check_distill import teacher_of, teachers_of
from megarl.errors import ConfigError

RUN: dict[str, Any] = {"model": {"path": "models/tiny"}, "data": {"train": ["train.parquet"]}}
MODEL: dict[str, Any] = {"distill": {"teacher": "model"}}
EXACT: dict[str, Any] = {"distill": {"teacher": "model", "mode": "exact"}}
SERVED = {"model_path": "t", "servers": ["http://host/v1"]}


def config(**sections: Any) -> Config:
    return from_dict(Config, {**RUN, **sections})


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        (
            {"teacher": {"model_path": "t"}},
            "teacher: is set, but algo.distill.teacher=none asks no teacher; set algo.distill.teacher=model, or remove "
            "teacher",
        ),
        ({"algo": MODEL}, "teacher.model_path: is not set, but algo.distill.teacher=model; set it to the"),
        (
            {"algo": EXACT, "teacher": {"model_path": "t", "layout": {"tp": 2}}, "actor": {"layout": {"dp": 2}}},
            "expected that of the actor",
        ),
        (
            {"algo": EXACT, "teacher": SERVED},
            "algo.distill.mode: got exact with teacher.servers, which send log-probs of few tokens; set "
            "algo.distill.mode=topk, or run the teacher on Megatron",
        ),
        (
            {"algo": EXACT, "teachers": {"a": {"model_path": "t"}, "b": {"model_path": "u"}}},
            "algo.distill.mode: got exact with the teachers teachers.a, teachers.b, expected one",
        ),
        (
            {"algo": MODEL, "teacher": SERVED, "rollout": {"temperature": 0.7}},
            "rollout.temperature: got 0.7 with teacher.servers, which answer log-probs at temperature 1",
        ),
        (
            {"algo": EXACT, "teacher": {"model_path": "t"}, "rollout": {"top_k": 50}},
            "rollout.top_k and rollout.top_p: got 50 and 1.0, but the teacher's distribution is over the whole",
        ),
        (
            {"algo": MODEL, "teachers": {"a": {"model_path": "t"}, "b": {"model_path": "u", "sources": ["a"]}}},
            "teachers.b.sources: a has the teacher teachers.a already; leave it to one of them",
        ),
        (
            {"algo": MODEL, "teacher": {**SERVED, "micro_batch_tokens": 9}},
            "teacher.micro_batch_tokens: is set, but teacher.servers compute; remove either",
        ),
        (
            {"algo": MODEL, "teachers": {"a": {"model_path": "t", "layout": {"tp": 2}}}},
            "teachers.a.layout: tp 2 × pp 1 × cp 1 × dp 1 = 2 ranks, expected <= 1, those of actor.layout",
        ),
    ],
)
def test_what_cannot_teach_is_refused(sections: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        check_train(config(**sections))


def test_samples_are_taught_by_environment_then_data_source_then_by_the_teacher_of_all_others() -> None:
    teachers = {"math": {"model_path": "t", "sources": ["gsm8k", "guess"]}, "code": {"model_path": "u"}}
    found = config(algo=MODEL, teachers=teachers)
    check_train(found)
    assert list(teachers_of(found)) == ["teachers.math", "teachers.code"]
    assert teacher_of(found, "gsm8k") == teacher_of(found, "code", "guess") == "teachers.math"
    assert teacher_of(found, "code") == "teachers.code"
    with pytest.raises(ConfigError, match=r"teachers: none is for the data source 'poems' \(environment none\); add"):
        teacher_of(found, "poems")
    assert teacher_of(config(algo=MODEL, teachers=teachers, teacher={"model_path": "v"}), "poems") == "teacher"
