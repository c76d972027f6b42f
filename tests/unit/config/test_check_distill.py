"""Rules of teachers and of distillation, by their messages; and who teaches which samples."""

from dataclasses import replace
from typing import Any

import pytest

from megarl.algos.build import algorithm_of
from megarl.cluster.roles import teacher_roles
from megarl.config import Config, from_dict
from megarl.config.check import check_sft, check_train
from megarl.config.check_distill import check_distill, teacher_of, teachers_of
from megarl.errors import ConfigError
from megarl.types.messages import Role

RUN: dict[str, Any] = {"model": {"path": "models/tiny"}, "data": {"train": ["train.parquet"]}}
MODEL: dict[str, Any] = {"distill": {"teacher": "model"}}
AVERAGED: dict[str, Any] = {"distill": {"teacher": "hint", "mode": "exact", "teacher_update_rate": 0.05}}
HINT: dict[str, Any] = {"distill": {"teacher": "hint", "mode": "exact"}}


def config(**sections: Any) -> Config:
    return from_dict(Config, {**RUN, **sections})


def test_a_policy_that_reads_hints_needs_no_further_model() -> None:
    own = config(algo=HINT, actor={"layout": {"tp": 2, "cp": 2, "pp": 2}})
    check_train(own)
    # Its packs are its own, so that it follows no recorded routes.
    check_distill(replace(own, actor=replace(own.actor, moe=replace(own.actor.moe, replay_routing=True))))
    assert teachers_of(own) == {}
    model = {"path": "models/tiny", "dtype": "float32"}
    frozen = config(algo=HINT, teacher={"model_path": "models/tiny"}, actor={"lora": {"rank": 4}}, model=model)
    check_train(frozen)
    # With adapters, that model is the policy's own base.
    (role,) = teacher_roles(frozen)
    assert (role.role, role.in_update_of, role.base_of) == (Role.TEACHER, Role.ACTOR, Role.ACTOR)


def test_a_teacher_that_follows_the_policy_is_its_model_in_its_layout() -> None:
    model, layout = {"path": "models/tiny", "dtype": "float32"}, {"layout": {"tp": 2}}
    moving = config(algo=AVERAGED, model=model, actor=layout)
    check_train(moving)
    assert list(teachers_of(moving)) == ["teacher"]
    (role,) = teacher_roles(moving)
    assert (role.model, role.settings, role.update_rate, role.trainable) == (moving.model, moving.actor, 0.05, False)
    # At rate 0 it is the frozen model that the policy began as.
    still = {"distill": {**AVERAGED["distill"], "teacher_update_rate": 0.0}}
    frozen = config(algo=HINT, model=model, actor=layout, teacher={"model_path": "models/tiny"})
    assert teacher_roles(config(algo=still, model=model, actor=layout)) == teacher_roles(frozen)
    # With adapters, it has some of its own on the actor's weights.
    (role,) = teacher_roles(config(algo=AVERAGED, model=model, actor={"lora": {"rank": 4}}))
    assert role.memory == (Role.TEACHER, Role.ACTOR)
    assert role.settings.lora is not None


def test_a_policy_cannot_learn_from_itself_alone() -> None:
    distill = {"teacher": "model", "mode": "exact", "teacher_update_rate": 0.05}
    alone = config(algo={"advantage": {"estimator": "none"}, "distill": distill}, rewards={"manager": "none"})
    with pytest.raises(ConfigError, match="estimator=none, so that the policy learns from itself alone, and stays as"):
        algorithm_of(alone)
    with pytest.raises(ConfigError, match=r"teacher_update_rate: got 0\.05, but sft learns from the teacher alone"):
        check_sft(config(algo={"distill": distill}, sft={"train": ["sft.parquet"]}))
    # Rewards move it, and its average holds it back.
    algorithm_of(held := config(algo={"distill": distill}))
    check_train(held)
    assert teacher_of(held, "poems") == "teacher"


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
