"""What the fields of the configuration say about themselves."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest

from megarl.config import Config
from megarl.config.load import with_overrides
from megarl.config.schema import EngineConfig, LayoutConfig, NodesConfig, PlacementConfig, SyncConfig
from megarl.config.setting import (
    AT_LEAST_0,
    Allowed,
    Range,
    Text,
    affected,
    allowed_by,
    check_values,
    needing_trust,
    section,
    setting,
)
from megarl.errors import ConfigError


def numbers(cls: Any, path: str = "", default: Allowed | None = None) -> Iterator[tuple[str, Allowed | None]]:
    """Key and range of every number, those of sections that may be null and of named ones too; not of pairs."""
    hints = get_type_hints(cls)
    for each in fields(cls):
        hint, allowed = hints[each.name], allowed_by(each, default)
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Inner:
    low: int = setting(0, AT_LEAST_0)
    high: int = 1

    def check(self, key: str) -> None:
        if self.low > self.high:
            raise ConfigError(f"{key}: {self.low} > {self.high}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Outer:
    first: Inner = section(Inner)
    named: Mapping[str, Inner] = section(dict)
    words: tuple[str, ...] = setting((), Text(expected="lower case", holds=str.islower))

    def check(self, key: str) -> None:
        if self.named:
            raise ConfigError(f"{key}: has names")


UNORDERED = Inner(low=2)


@pytest.mark.parametrize(
    ("outer", "sections", "message"),
    [
        # What a field accepts holds wherever it is, and before a rule of its section.
        (Outer(first=Inner(low=-1, high=-2)), (), "top.first.low: got -1, expected >= 0"),
        (Outer(words=("a", "B")), (), "top.words: got 'B', expected lower case"),
        (Outer(first=UNORDERED), ("top.first",), "top.first: 2 > 1"),
        # The rules of a section come after those of the sections in it.
        (Outer(named={"x": UNORDERED}), ("top",), "top.named.x: 2 > 1"),
        (Outer(named={"x": Inner()}), ("top",), "top: has names"),
    ],
)
def test_a_walk_checks_values_and_sections(outer: Outer, sections: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}$"):
        check_values(outer, sections, "top")


def test_rules_hold_for_the_sections_that_are_named_alone() -> None:
    check_values(Outer(first=UNORDERED, named={"x": UNORDERED}, words=("a",)), ("top.fir", "other"), "top")


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
# What is read at each sync.
LATER = ("verify", "canary_every")
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
        assert affected(base, config, "workers") == ([] if name in LATER else [f"sync.{name}"]), name
    assert "trainer.num_nodes" in dict(changed(PlacementConfig(trainer=NodesConfig())))


def test_nothing_else_affects() -> None:
    expected = {"actor.layout", "actor.lora", "actor.vision.train", "placement", "rollout.engine"}
    sync = {f"sync.{each.name}" for each in fields(SyncConfig)} - {f"sync.{name}" for name in LATER}
    assert set(declared(Config, "workers")) == expected | sync | {key.partition("=")[0] for key in WORKERS}
    assert set(declared(Config, "engines")) == expected | {
        "sync",
        "trainer.mismatch_gate_nats",
        "run.batch_invariant",
        "rollout.head_tokens",
        # Without copies of weights, samples in flight cannot be compared with what sampled them.
        "algo.policy_loss.kept_versions",
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


# Settings that take any text or value, and that nobody needs to trust: names of columns, of megarl's own functions, of
# files with data or models, texts for the model, and what only training uses.
ONLY_DATA = {
    *("run.name", "run.dir", "model.path", "model.config_path", "data.train", "data.train.path", "data.val"),
    "checkpoint.accept_changed",
    *("data.chat_template.*", "data.prompt_key", "data.label_key", "data.target_key", "data.source_key"),
    *("data.default_source", "data.image_key"),
    *("data.system_prompt", "algo.name", "algo.advantage.estimator", "algo.aggregation", "algo.correction.name"),
    *(
        "algo.filter.names",
        "algo.shapers",
        "algo.cpo.method",
        "algo.cpo.hint.field",
        "algo.cpo.hint.template",
        "algo.cpo.difficulty_field",
    ),
    *("algo.demonstrations.strategy", "algo.kl.estimator", "algo.kl.loss_estimator", "algo.policy_loss.name"),
    *("algo.filter.names", "algo.shapers", "algo.settings.*.*"),  # of what algo.plugins registers
    *("algo.off_policy.reshape", "algo.off_policy.on_policy_reshape", "environment.key", "rewards.sources.*.scorer"),
    *("reference.model_path", "critic.model_path", "reward_model.model_path"),
    *("teacher.model_path", "teacher.served_name", "teacher.sources"),
    *(f"{role}.lora.path" for role in ("actor", "critic", "reward_model")),
    *("rollout.stop", "rollout.replay_dir"),
    *("rewards.sources.*.format", "rewards.custom.name", "rewards.custom.arguments.*", "rewards.hybrid.parts.*.judge"),
    *("rewards.hybrid.routes.*", "sft.train", "sft.val", "sft.chat_key", "sft.answer_key", "train_reward.train"),
    *("train_reward.val", "train_preference.train", "train_preference.val", "train_preference.objective"),
    *("logging.wandb_project", "logging.mlflow_experiment", "logging.trackio_project", "logging.swanlab_project"),
    *(f"{role}.layout.pipeline_layout" for role in ("actor", "critic", "reference", "reward_model", "teacher")),
    *("cluster.hosts", "cluster.target"),  # of a cluster whose address the user gives
}


def texts(hint: Any, key: str) -> Iterator[str]:
    """The keys of all settings that take any text or value, except within those that need trust."""
    if is_dataclass(hint):
        hints = get_type_hints(hint)
        for each in fields(hint):
            if not each.metadata.get("needs_trust"):
                yield from texts(hints[each.name], f"{key}.{each.name}" if key else each.name)
    elif hint in (str, Any):
        yield key
    elif get_origin(hint) is Mapping:
        yield from texts(get_args(hint)[1], f"{key}.*")
    elif get_origin(hint) is not Literal:
        for each in get_args(hint):
            yield from texts(each, key)


def test_every_text_is_data_or_needs_trust() -> None:
    """A new setting that names code, commands, services or files to write is declared with needs_trust=True."""
    assert set(texts(Config, "")) == ONLY_DATA


@pytest.mark.parametrize(
    "override",
    [
        "environment.default=repair",
        "environment.entries.shell={type: mcp, arguments: {server: [sh]}}",
        "rewards.custom.path=reward.py",
        "rewards.custom.functions.mine={path: reward.py}",
        "rewards.code.isolation=limits_only",
        "rewards.code.import_paths=[/home]",
        "rewards.code.limits.files_mib=1000000",
        "rewards.remote.urls=['http://elsewhere']",
        "rewards.hybrid.parts.far={manager: remote, urls: ['http://elsewhere']}",
        "rewards.judges.mine={cache: ~/.profile}",
        "rewards.judge_servers.mine={model: m, args: {trust-remote-code: true}}",
        "rollout.engine.vllm.trust_remote_code=true",
        "cluster.address=elsewhere:6379",
    ],
)
def test_what_needs_trust(override: str) -> None:
    (key,) = dict(needing_trust(with_overrides(Config(), [override])))
    named = override.partition("=")[0]
    assert named.startswith(key) or key.startswith(named)


def test_data_needs_no_trust() -> None:
    overrides = [
        "data.chat_template.thinking=true",
        "rewards.sources.sums.scorer=math",
        "algo.name=x",
        "rollout.stop=[a]",
    ]
    assert list(needing_trust(with_overrides(Config(), overrides))) == []
