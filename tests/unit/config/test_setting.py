"""What the fields of the configuration say about themselves."""

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any, get_args, get_origin, get_type_hints

import pytest

from megarl.config import Config
from megarl.config.load import with_overrides
from megarl.config.schema import EngineConfig, LayoutConfig, NodesConfig, PlacementConfig, SyncConfig
from megarl.config.setting import AT_LEAST_0, Range, affected, range_of


def numbers(cls: Any, path: str = "", default: Range | None = None) -> Iterator[tuple[str, Range | None]]:
    """Key and range of every number, those of sections that may be null and of named ones too; not of pairs."""
    hints = get_type_hints(cls)
    for each in fields(cls):
        hint, allowed = hints[each.name], range_of(each, default)
        alternatives = (hint, *get_args(hint))
        sections = [alternative for alternative in alternatives if is_dataclass(alternative)]
        if sections:
            name = "NAME." if get_origin(hint) is Mapping else ""
            yield from numbers(sections[0], f"{path}{each.name}.{name}", allowed)
        elif {int, float} & set(alternatives):
            yield path + each.name, allowed


def test_every_number_of_the_schema_has_a_range() -> None:
    found = dict(numbers(Config))
    assert len(found) > 150
    assert not [key for key, allowed in found.items() if allowed is None]


def test_a_range() -> None:
    odd = Range(expected="odd", at_least=1, below=3, also=-1, never=2)
    assert [x for x in (-2, -1, 0, 1, 1.5, 2, 2.5, 3) if odd.holds(x)] == [-1, 1, 1.5, 2.5]
    assert not AT_LEAST_0.holds(float("nan"))


# What the processes of a cluster are started with; without sync.verify, which the trainer reads alone.
WORKERS = (
    "run.deterministic=true",
    "run.batch_invariant=true",
    "model.dtype=float32",
    "rollout.timeout_s=1",
    "rewards.judge_servers={big: {model: m}}",
    *(f"sync.{name}" for name in ("host_group=device", "dtype=bfloat16", "delta=true")),
    *(f"sync.{name}" for name in ("delta_full_every=2", "cuda_ipc=true")),
)
ENGINES = ("trainer.mismatch_gate_nats=1", "run.batch_invariant=true")


@pytest.mark.parametrize("override", WORKERS)
def test_a_setting_that_affects_workers(override: str) -> None:
    assert affected(Config(), with_overrides(Config(), [override]), "workers") == [override.partition("=")[0]]


@pytest.mark.parametrize("override", ENGINES)
def test_a_setting_that_affects_engines(override: str) -> None:
    assert affected(Config(), with_overrides(Config(), [override]), "engines") == [override.partition("=")[0]]


def changed(section: Any) -> Iterator[tuple[str, Any]]:
    """A copy of a section for each of its settings, in which that one alone has another value."""
    for each in fields(section):
        value = getattr(section, each.name)
        if is_dataclass(value):
            yield from ((f"{each.name}.{name}", replace(section, **{each.name: x})) for name, x in changed(value))
        else:
            yield each.name, replace(section, **{each.name: "another"})


def test_whole_sections_affect() -> None:
    base = Config()
    for name, engine in changed(EngineConfig()):
        config = replace(base, rollout=replace(base.rollout, engine=engine))
        assert affected(base, config, "workers") == affected(base, config, "engines") == ["rollout.engine"], name
    for name, layout in changed(LayoutConfig()):
        config = replace(base, actor=replace(base.actor, layout=layout))
        assert affected(base, config, "workers") == affected(base, config, "engines") == ["actor.layout"], name
    for name, placement in changed(PlacementConfig()):
        config = replace(base, placement=placement)
        assert affected(base, config, "workers") == affected(base, config, "engines") == ["placement"], name
    for name, sync in changed(SyncConfig()):
        config = replace(base, sync=sync)
        assert affected(base, config, "engines") == ["sync"], name
        assert affected(base, config, "workers") == ([] if name == "verify" else [f"sync.{name}"]), name
    assert "trainer.num_nodes" in dict(changed(PlacementConfig(trainer=NodesConfig())))


def test_nothing_else_affects() -> None:
    expected = {"actor.layout", "placement", "rollout.engine"}
    sync = {f"sync.{each.name}" for each in fields(SyncConfig)} - {"sync.verify"}
    assert set(declared(Config, "workers")) == expected | sync | {key.partition("=")[0] for key in WORKERS}
    assert set(declared(Config, "engines")) == expected | {
        "sync",
        "trainer.mismatch_gate_nats",
        "run.batch_invariant",
        "rollout.temperature",
        "rollout.top_p",
        "rollout.top_k",
    }


def declared(cls: Any, by: str) -> Iterator[str]:
    """The keys of the schema that are declared to affect something, of sections in preference to what they hold."""
    hints = get_type_hints(cls)
    for each in fields(cls):
        if by in each.metadata.get("affects", ()):
            yield each.name
        elif is_dataclass(hints[each.name]):
            yield from (f"{each.name}.{key}" for key in declared(hints[each.name], by))


def test_what_affects_nothing() -> None:
    overrides = ["run.seed=3", "model.path=elsewhere", "critic.layout={tp: 2}", "rollout.num_samples=2"]
    for by in ("engines", "workers"):
        assert affected(Config(), with_overrides(Config(), overrides), by) == []
