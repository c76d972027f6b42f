"""Phases as data, the moves between them, and a ledger whose calls are recorded."""

import itertools
from collections.abc import Sequence
from dataclasses import replace

import pytest

from megarl.cluster.offloading import (
    GENERATE,
    LOAD,
    SYNC,
    MemoryLedger,
    Phase,
    Resident,
    built_parts,
    checkpointing,
    exporting,
    forward,
    phase_table,
    plan_moves,
    step_phases,
)
from megarl.config.lora import LoraConfig
from megarl.config.schema import ActorConfig, ModelConfig
from megarl.types.messages import Head, Part, Role, RoleSpec

ACTOR = RoleSpec(role=Role.ACTOR, model=ModelConfig(), settings=ActorConfig())
REFERENCE = RoleSpec(role=Role.REFERENCE, model=ModelConfig(), settings=ActorConfig(), trainable=False)
CRITIC = RoleSpec(role=Role.CRITIC, model=ModelConfig(), settings=ActorConfig(), head=Head.SCALAR)
STEP = step_phases([ACTOR, REFERENCE])


def residents(*names: str) -> frozenset[Resident]:
    return frozenset(Resident(*name.split(".")) for name in names)


class Recorder:
    """Workers and engines that write down what they are told, among other events."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def offload(self, role: Role, parts: Sequence[Part]) -> int:
        self.calls.append(f"offload {role} {'+'.join(parts)}")
        return 2**29 * len(parts)

    def onload(self, role: Role, parts: Sequence[Part]) -> None:
        self.calls.append(f"onload {role} {'+'.join(parts)}")

    def sleep(self) -> None:
        self.calls.append("sleep")

    def pause(self) -> None:
        self.calls.append("pause")

    def resume(self) -> None:
        self.calls.append("resume")

    def wake(self, parts: Sequence[str]) -> None:
        self.calls.append(f"wake {'+'.join(parts)}")


def run(phases: Sequence[Phase], ledger: MemoryLedger, recorder: Recorder) -> list[str]:
    recorder.calls.clear()
    for phase in phases:
        ledger.enter(phase)
        recorder.calls.append(f"<{phase.name}>")
    return recorder.calls


def loaded(recorder: Recorder, *roles: RoleSpec, enabled: bool = True) -> MemoryLedger:
    ledger = MemoryLedger(recorder, recorder, enabled=enabled)
    ledger.enter(LOAD)
    ledger.add(built_parts(roles))
    return ledger


def test_engines_sleep_while_the_trainer_loads() -> None:
    recorder = Recorder()
    ledger = loaded(recorder, ACTOR, REFERENCE)
    assert recorder.calls == ["sleep"]
    assert ledger.resident == residents("actor.params", "actor.grads", "actor.optimizer", "reference.params")


def test_phases_of_a_step() -> None:
    assert [phase.name for phase in STEP] == ["generate", "score reference", "score actor", "update actor", "sync"]
    assert [phase.needs for phase in STEP] == [
        residents("engine.weights", "engine.kv_cache"),
        residents("reference.params"),
        residents("actor.params"),
        residents("actor.params", "actor.grads", "actor.optimizer"),
        residents("actor.params", "engine.weights"),
    ]


def test_phases_with_a_critic() -> None:
    """The actor is last to score and to be updated, since the sync that follows needs it."""
    assert [phase.name for phase in step_phases([ACTOR, REFERENCE, CRITIC])] == [
        "generate",
        "score reference",
        "score critic",
        "score actor",
        "update critic",
        "update actor",
        "sync",
    ]
    frozen = replace(CRITIC, trainable=False)
    assert "update critic" not in [phase.name for phase in step_phases([ACTOR, frozen])]
    assert checkpointing([ACTOR, CRITIC]).needs == residents(
        "actor.params", "actor.optimizer", "critic.params", "critic.optimizer"
    )
    assert checkpointing([ACTOR, frozen]).needs == residents("actor.params", "actor.optimizer")


def test_phases_with_roles_on_the_actors_base() -> None:
    """The reference has nothing of its own, the critic its adapters and head."""
    lora = ActorConfig(lora=LoraConfig())
    reference = replace(REFERENCE, base_of=Role.ACTOR)
    roles = [replace(ACTOR, settings=lora), reference, replace(CRITIC, settings=lora, base_of=Role.ACTOR)]
    assert {part.owner for part in built_parts(roles)} == {"actor", "critic"}
    needs = {phase.name: phase.needs for phase in step_phases(roles)}
    assert needs["score reference"] == residents("actor.params")
    assert needs["score critic"] == residents("actor.params", "critic.params")
    assert needs["update critic"] == residents("actor.params", "critic.params", "critic.grads", "critic.optimizer")
    assert exporting(Role.CRITIC, roles[2].memory).needs == needs["score critic"]


def test_an_update_and_a_checkpoint_need_the_teacher_that_follows_the_actor() -> None:
    teacher = RoleSpec(
        role=Role.TEACHER, model=ModelConfig(), settings=ActorConfig(), trainable=False, update_rate=0.05
    )
    needs = {phase.name: phase.needs for phase in step_phases([ACTOR, teacher])}
    assert needs["score teacher"] == residents("teacher.params")
    assert needs["update actor"] == residents("actor.params", "actor.grads", "actor.optimizer", "teacher.params")
    assert checkpointing([ACTOR, teacher]).needs == residents("actor.params", "actor.optimizer", "teacher.params")


def test_a_step_after_the_first() -> None:
    """Wake the weights, sync, offload the trainer, wake the KV caches; one role at a time before that."""
    recorder = Recorder()
    ledger = loaded(recorder, ACTOR, REFERENCE)
    run([SYNC], ledger, recorder)
    expected = [
        "offload actor params",
        "wake kv_cache",
        "<generate>",
        "sleep",
        "onload reference params",
        "<score reference>",
        "offload reference params",
        "onload actor params",
        "<score actor>",
        "onload actor grads+optimizer",
        "<update actor>",
        "offload actor grads+optimizer",
        "wake weights",
        "<sync>",
    ]
    assert run(STEP, ledger, recorder) == expected
    assert run(STEP, ledger, recorder) == expected


def test_the_first_sync_offloads_what_it_does_not_need() -> None:
    recorder = Recorder()
    ledger = loaded(recorder, ACTOR, REFERENCE)
    assert run([SYNC], ledger, recorder) == [
        "offload actor grads+optimizer",
        "offload reference params",
        "wake weights",
        "<sync>",
    ]


def test_a_checkpoint_and_the_export_bring_back_what_they_write() -> None:
    recorder = Recorder()
    ledger = loaded(recorder, ACTOR, REFERENCE)
    run([SYNC, GENERATE], ledger, recorder)
    assert run([checkpointing([ACTOR, REFERENCE]), exporting(Role.ACTOR)], ledger, recorder) == [
        "sleep",
        "onload actor optimizer+params",
        "<checkpoint>",
        "offload actor optimizer",
        "<export actor>",
    ]


def test_engines_cannot_drop_their_caches_alone() -> None:
    assert [str(move) for move in plan_moves(GENERATE.needs, SYNC)] == [
        "offload engine.kv_cache+weights",
        "onload actor.params",
        "onload engine.weights",
    ]


def test_every_change_of_phase_leaves_exactly_what_is_needed() -> None:
    for before, after in itertools.product(STEP, STEP):
        resident = set(before.needs)
        for move in plan_moves(before.needs, after):
            parts = {Resident(move.owner, part) for part in move.parts}
            # Nothing is moved to where it is.
            assert resident.isdisjoint(parts) if move.to_device else parts <= resident
            resident = resident | parts if move.to_device else resident - parts
            # No moment needs more than the larger of the two phases holds.
            assert resident <= before.needs or resident <= after.needs
        assert resident == after.needs


def test_without_offloading_nothing_moves() -> None:
    recorder = Recorder()
    ledger = loaded(recorder, ACTOR, enabled=False)
    assert run(STEP, ledger, recorder) == [f"<{phase.name}>" for phase in STEP]
    assert ledger.metrics() == {}


def test_released_memory_is_summed_by_role_until_it_is_read() -> None:
    recorder = Recorder()
    ledger = loaded(recorder, ACTOR, REFERENCE)
    run([SYNC, GENERATE], ledger, recorder)
    # Half a GiB a part: the actor's three, the reference's one.
    assert ledger.metrics() == {"memory/offloaded_gib/actor": 1.5, "memory/offloaded_gib/reference": 0.5}
    assert ledger.metrics() == {}


def test_the_table_has_a_line_per_phase() -> None:
    lines = phase_table(SYNC.needs, [GENERATE, forward(Role.ACTOR)])
    assert [[cell.strip() for cell in line.split("|")] for line in lines] == [
        ["phase", "moves before it", "on the devices"],
        ["generate", "offload actor.params, onload engine.kv_cache", "engine.kv_cache, engine.weights"],
        ["score actor", "offload engine.kv_cache+weights, onload actor.params", "actor.params"],
    ]


@pytest.mark.parametrize("offload", [False, True])
def test_engines_are_paused_before_other_phases_and_resumed_once_they_may_generate(offload: bool) -> None:
    recorder = Recorder()
    ledger = MemoryLedger(recorder, recorder, enabled=offload, pauses=True)
    calls = run([GENERATE, SYNC, GENERATE], ledger, recorder)
    assert [call for call in calls if call in ("pause", "resume", "sleep", "wake kv_cache")] == (
        ["resume", "pause", "sleep", "wake kv_cache", "resume"] if offload else ["resume", "pause", "resume"]
    )
