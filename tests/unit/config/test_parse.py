"""Strict construction of the tree from a mapping."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from megarl.config import Config, from_dict
from megarl.config.parse import parse_bool
from megarl.config.schema import LayoutConfig, OptimizerConfig, WeightedFile
from megarl.errors import ConfigError


def message(mapping: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        from_dict(Config, mapping)
    return str(caught.value)


def optimizer(**keys: Any) -> OptimizerConfig:
    return from_dict(Config, {"actor": {"optimizer": keys}}).actor.optimizer


def test_absent_keys_keep_their_defaults() -> None:
    assert from_dict(Config, {}) == Config()
    layout = from_dict(Config, {"actor": {"layout": {"tp": 2}}}).actor.layout
    assert layout == LayoutConfig(tp=2, dp=1, sequence_parallel=False)


@pytest.mark.parametrize(
    ("mapping", "expected"),
    [
        (
            {"actor": {"optimiser": {}}},
            "unknown key 'actor.optimiser'; did you mean 'actor.optimizer'?",
        ),
        (
            {"actor": {"layout": {"dp:1": None}}},
            "unknown key 'actor.layout.dp:1'; YAML asks for a space after the colon, as in dp: 2",
        ),
        (
            {"actor": {"layout": "dp:1 tp:2"}},
            "actor.layout: got 'dp:1 tp:2' (str), expected a mapping; YAML asks for a space after the "
            "colon, as in dp: 2",
        ),
        (
            {"rolout": {}},
            "unknown key 'rolout'; did you mean 'rollout'?",
        ),
        (  # at the wrong level
            {"optimizer": {"lr": 1e-5}},
            "unknown key 'optimizer'; did you mean 'actor.optimizer' or 'critic.optimizer'?",
        ),
        (  # at the wrong level, with a similar key beside it and two right places
            {"trainer": {"num_samples": 4}},
            "unknown key 'trainer.num_samples'; did you mean 'rollout.num_samples' or 'validation.num_samples'?",
        ),
        (  # at the wrong level and misspelt
            {"model": {"sequence_paralel": True}},
            "unknown key 'model.sequence_paralel'; did you mean 'actor.layout.sequence_parallel'?",
        ),
        (  # nothing near: what there is
            {"sync": {"xyzzy": 1}},
            "unknown key 'sync.xyzzy'; sync has: verify, canary_every, host_group, dtype, delta, delta_full_every, "
            "cuda_ipc",
        ),
        (
            {"actor.optimizer.lr": 1e-5},
            "unknown key 'actor.optimizer.lr'; dotted keys belong to overrides on the command line; "
            "in a file, nest one mapping in the other",
        ),
    ],
)
def test_unknown_key(mapping: dict[str, Any], expected: str) -> None:
    assert message(mapping) == expected


def test_unknown_key_at_the_root_lists_the_sections() -> None:
    assert message({"zzzz": 1}).startswith("unknown key 'zzzz'; there are: run, model, data, algo, ")


def test_key_that_is_not_a_string() -> None:
    assert message({"sync": {True: 1}}).startswith("unknown key 'sync.True'; ")


@pytest.mark.parametrize(
    ("mapping", "expected"),
    [
        ({"actor": {"layout": {"tp": "two"}}}, "actor.layout.tp: got 'two' (str), expected int"),
        ({"actor": {"layout": {"tp": "2"}}}, "actor.layout.tp: got '2' (str), expected int"),
        ({"actor": {"layout": {"tp": True}}}, "actor.layout.tp: got True (bool), expected int"),
        ({"actor": {"layout": {"tp": 2.5}}}, "actor.layout.tp: got 2.5 (float), expected int"),
        ({"actor": {"layout": {"tp": None}}}, "actor.layout.tp: got null, expected int"),
        ({"actor": {"layout": 4}}, "actor.layout: got 4 (int), expected a mapping"),
        ({"rollout": None}, "rollout: got null, expected a mapping; give its settings, or leave it out"),
        ([1], "configuration: got [1] (list), expected a mapping"),
        ({"sync": {"verify": 1}}, "sync.verify: got 1 (int), expected true or false"),
        ({"run": {"name": 7}}, "run.name: got 7 (int), expected str"),
        (
            {"rollout": {"replay_dir": 7}},
            "rollout.replay_dir: got 7 (int), expected str or null",
        ),
        (
            {"algo": {"policy_loss": {"dual_clip": "off"}}},
            "algo.policy_loss.dual_clip: got 'off' (str), expected a finite float or null",
        ),
        (
            {"model": {"dtype": "fp16"}},
            "model.dtype: got 'fp16' (str), expected one of 'float32', 'bfloat16'",
        ),
        (
            {"data": {"val": "a.parquet"}},
            "data.val: got 'a.parquet' (str), expected a list of str; put it in brackets, as in data.val=[a.parquet]",
        ),
        ({"data": {"val": ["a", 3]}}, "data.val[1]: got 3 (int), expected str"),
        (
            {"data": {"train": "a.parquet"}},
            "data.train: got 'a.parquet' (str), expected a list of str or {path, weight}; "
            "put it in brackets, as in data.train=[a.parquet]",
        ),
        ({"data": {"train": ["a", 3]}}, "data.train[1]: got 3 (int), expected str or {path, weight}"),
        (
            {"data": {"train": [{"path": "a", "weight": "x"}]}},
            "data.train[0].weight: got 'x' (str), expected a finite float",
        ),
        (
            {"data": {"train": [{"path": "a", "wieght": 1}]}},
            "unknown key 'data.train[0].wieght'; did you mean 'data.train[0].weight'?",
        ),
        ({"data": {"train": ["a", {"weight": 1}]}}, "data.train[1].path: is missing; data.train[1] has: path, weight"),
        (
            {"data": {"chat_template": {"a": [1, {"b": math.nan}]}}},
            "data.chat_template.a[1].b: got nan (float), expected any JSON value",
        ),
        (
            {"data": {"chat_template": {"a": {1: 2}}}},
            "data.chat_template.a: got {1: 2} (dict), expected any JSON value",
        ),
        (
            {"data": {"chat_template": [1]}},
            "data.chat_template: got [1] (list), expected a mapping from names to any JSON value",
        ),
        (
            {"logging": {"profile_steps": 3}},
            "logging.profile_steps: got 3 (int), expected a list of 2 int or null",
        ),
        (
            {"actor": {"optimizer": {"betas": [0.9]}}},
            "actor.optimizer.betas: got [0.9] (list), expected a list of 2 float",
        ),
        (
            {"actor": {"optimizer": {"lr": True}}},
            "actor.optimizer.lr: got True (bool), expected a finite float",
        ),
        (
            {"actor": {"optimizer": {"lr": math.inf}}},
            "actor.optimizer.lr: got inf (float), expected a finite float",
        ),
        (
            {"actor": {"optimizer": {"lr": math.nan}}},
            "actor.optimizer.lr: got nan (float), expected a finite float",
        ),
        (
            {"actor": {"optimizer": {"lr": "1e999"}}},
            "actor.optimizer.lr: got '1e999' (str), expected a finite float",
        ),
    ],
)
def test_wrong_type(mapping: Any, expected: str) -> None:
    """What to do may follow."""
    assert f"{message(mapping)}; ".startswith(f"{expected}; ")


@pytest.mark.parametrize(
    ("written", "value"),
    [("1e-6", 1e-6), ("1.5E6", 1.5e6), ("-.5e+1", -5.0), ("2.e0", 2.0), (3, 3.0), (0.25, 0.25)],
)
def test_float_field(written: object, value: float) -> None:
    lr = optimizer(lr=written).lr
    assert lr == value
    assert type(lr) is float


@pytest.mark.parametrize(("written", "value"), [(3, 3), (100.0, 100), ("1e3", 1000), (10**20, 10**20)])
def test_int_field(written: object, value: int) -> None:
    steps = optimizer(warmup_steps=written).warmup_steps
    assert steps == value
    assert type(steps) is int


def test_lists_become_tuples_of_the_field_type() -> None:
    assert optimizer(betas=[0, "9e-1"]).betas == (0.0, 0.9)
    assert from_dict(Config, {"data": {"train": ["a", "b"]}}).data.train == ("a", "b")
    assert from_dict(Config, {"data": {"train": []}}).data.train == ()


def test_a_file_of_a_mixture() -> None:
    train = from_dict(Config, {"data": {"train": ["a", {"path": "b", "weight": 2}, {"path": "c"}]}}).data.train
    assert train == ("a", WeightedFile(path="b", weight=2.0), WeightedFile(path="c", weight=1.0))


def test_null_is_a_value_of_optional_fields_only() -> None:
    assert from_dict(Config, {"algo": {"policy_loss": {"dual_clip": None}}}).algo.policy_loss.dual_clip is None


def test_string_that_looks_like_a_number_stays_a_string() -> None:
    assert from_dict(Config, {"run": {"name": "1e5"}}).run.name == "1e5"


def test_subtree_with_its_path() -> None:
    with pytest.raises(ConfigError, match=r"^unknown key 'actor\.layout\.tpp'; did you mean 'actor\.layout\.tp'\?$"):
        from_dict(LayoutConfig, {"tpp": 2}, "actor.layout")
    with pytest.raises(ConfigError, match=r"^actor\.layout\.tp: got 'x'"):
        from_dict(LayoutConfig, {"tp": "x"}, "actor.layout")
    assert from_dict(LayoutConfig, {"tp": 2}, "actor.layout") == LayoutConfig(tp=2)


def test_texts_that_mean_true_or_false_golden() -> None:
    golden = json.loads((Path(__file__).parents[2] / "golden" / "algos.json").read_text(encoding="utf-8"))
    (case,) = (case for case in golden["cases"] if case["id"] == "B.strbool")
    assert [parse_bool(x) for x in case["inputs"]["x"]] == case["expected"]


@pytest.mark.parametrize("value", ["", "maybe", "truee", 1, 0, None, 1.0])
def test_other_values_are_not_booleans(value: object) -> None:
    with pytest.raises(ConfigError, match="expected true or false"):
        parse_bool(value)


def test_boolean_fields_take_their_texts() -> None:
    assert from_dict(Config, {"sync": {"verify": "no"}}).sync.verify is False
    assert from_dict(Config, {"sync": {"verify": "Yes"}}).sync.verify is True
    assert message({"sync": {"verify": "maybe"}}) == "sync.verify: got 'maybe' (str), expected true or false"


@pytest.mark.parametrize(
    ("mapping", "found"),
    [
        ({"data": {"system_prompt": "Be happy \ud83d"}}, r"data\.system_prompt has '\\ud83d' at position 9"),
        (
            {"environment": {"entries": {"e": {"type": "tools", "arguments": {"names": ["\ud83d"]}}}}},
            r"environment\.entries\.e\.arguments\.names\[0\] has '\\ud83d' at position 0",
        ),
        # What Python makes of a byte of the command line that is not UTF-8.
        ({"run": {"dir": b"caf\xe9".decode("utf-8", "surrogateescape")}}, r"run\.dir has '\\udce9' at position 3"),
    ],
)
def test_settings_are_texts_that_utf8_can_hold(mapping: dict[str, Any], found: str) -> None:
    with pytest.raises(ConfigError, match=rf"^{found}, .*complete or remove it$"):
        from_dict(Config, mapping)


INSERTED = ("exp-${run.seed}", "${oc.env:USER}", "runs/${oc.env:USER,x}/a", "${now:%Y-%m-%d}", "${..seed}")


@pytest.mark.parametrize("text", INSERTED)
@pytest.mark.parametrize("where", ["text", "any"])
def test_nothing_is_inserted_as_omegaconf_would(text: str, where: str) -> None:
    tree: dict[str, Any] = {"run": {"name": text}}
    if where == "any":
        tree = {"data": {"chat_template": {"name": text}}}
    with pytest.raises(ConfigError, match=r"name: got '.*', but nothing is inserted here; write the value"):
        from_dict(Config, tree)


def test_texts_in_which_braces_mean_something_else() -> None:
    for text in ("Write ${user.name} in full", "costs ${x}^2$", "$\\frac{a.b}{c}$", "{now:x}"):
        assert from_dict(Config, {"data": {"system_prompt": text}}).data.system_prompt == text


@pytest.mark.parametrize(("written", "read"), [("1e-6", 1e-6), ("2E3", 2000.0), ("1e999", "1e999"), ("e5", "e5")])
def test_numbers_with_an_exponent_are_numbers_at_any_depth(written: str, read: object) -> None:
    """YAML 1.1 reads them as texts, which a template or a user's function would get."""
    tree = {"data": {"chat_template": {"a": written, "b": {"c": [written]}}}}
    assert from_dict(Config, tree).data.chat_template == {"a": read, "b": {"c": [read]}}
