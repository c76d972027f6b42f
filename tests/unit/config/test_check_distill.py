"""Rules of teachers and of distillation, by their messages; and who teaches which samples."""

import re
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
EXACT: dict[str, Any] = {"distill": {"teacher": "model", "mode": "exact"}}
SERVED = {"model_path": "t", "servers": ["http://host/v1"]}
WRITING = {"model_path": "t", "writers": ["http://host/v1"], "served_name": "big"}


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
            {"algo": HINT, "teachers": {"a": {"model_path": "t"}}},
            "teachers: got a with algo.distill.teacher=hint, where the policy teaches itself",
        ),
        (
            {"algo": {**HINT, "cpo": {"method": "mi"}}},
            "algo.cpo.method: got mi with algo.distill.teacher=hint, which both learn from one hint",
        ),
        (
            {"algo": {"distill": {"teacher": "hint"}}, "rollout": {"top_k": 50}},
            "rollout.top_k and rollout.top_p: got 50 and 1.0 with algo.distill.teacher=hint",
        ),
        (
            {"algo": {"distill": {"teacher": "hint", "shuffled_baseline": True}}, "trainer": {"prompts_per_step": 1}},
            "algo.distill.shuffled_baseline: got true with trainer.prompts_per_step=1",
        ),
        (
            {"algo": HINT, "teacher": {"layout": {"tp": 2}}, "actor": {"layout": {"dp": 2}}},
            "teacher.model_path: is not set, but algo.distill.teacher=hint asks teacher; set it to its directory",
        ),
        (
            {"algo": HINT, "actor": {"layout": {"pp": 2, "virtual_pp": 2, "overlap_p2p": True}}},
            "actor.layout.virtual_pp: got 2 with algo.distill.mode=exact, expected 1",
        ),
        (
            {"algo": AVERAGED, "teacher": {"model_path": "t"}},
            "algo.distill.teacher_update_rate: got 0.05 with teacher.model_path=t, but a teacher that follows the "
            "policy begins as model.path=models/tiny; leave teacher.model_path out, or set teacher_update_rate=null",
        ),
        (
            {"algo": AVERAGED, "teacher": {"layout": {"dp": 2}}, "actor": {"layout": {"tp": 2}}},
            "as each rank averages the weights that it holds; set teacher.layout=null",
        ),
        (
            {
                "algo": {"distill": {"teacher": "hint", "teacher_update_rate": 0.05}},
                "teacher": {"servers": ["http://h"]},
            },
            "algo.distill.teacher_update_rate: got 0.05 with teacher.servers, whose weights stay as they are",
        ),
        (
            {"algo": {"distill": {"teacher": "model", "teacher_update_rate": 0.05}}, "teachers": {"a": {}}},
            "algo.distill.teacher_update_rate: got 0.05 with teachers a, but only the one teacher of the section",
        ),
        (
            {"algo": {"distill": {"teacher": "hint", "teacher_update_rate": 1.5}}},
            "algo.distill.teacher_update_rate: got 1.5, expected in [0, 1]",
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


WRITTEN: dict[str, Any] = {"demonstrations": {"strategy": "fixed", "source": "teacher", "max_ratio": 1.0}}


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        (
            {"algo": WRITTEN},
            "algo.demonstrations.source: got teacher with algo.distill.teacher=none, which has no model",
        ),
        (
            {"algo": {**EXACT, **WRITTEN}, "teacher": {"model_path": "t"}},
            "but neither teacher.writers nor teacher.servers lists servers that could write",
        ),
        (
            {"algo": {**EXACT, **WRITTEN}, "teacher": WRITING, "rollout": {"stop": ["x"]}},
            "with rollout.stop=['x'], texts at which a teacher does not end; use rollout.stop_token_ids",
        ),
        (
            {"algo": {**MODEL, **WRITTEN}, "teacher": WRITING},
            "with algo.distill.mode=sampled, which learns from the policy's own samples alone; set",
        ),
        (
            {"algo": EXACT, "teacher": WRITING},
            "teacher.writers: is set, but algo.demonstrations.source=data asks no teacher for demonstrations; set",
        ),
    ],
)
def test_teachers_that_cannot_write_are_refused(sections: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        check_train(config(**sections))


def test_a_teacher_on_megatron_may_have_servers_that_write() -> None:
    check_train(config(algo={**EXACT, **WRITTEN}, teacher=WRITING))
