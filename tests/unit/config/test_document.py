"""The key reference and the JSON schema: what they say of a key, and that they are not stale."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from megarl.config import Config
from megarl.config.document import (
    COMMAND,
    JSON_SCHEMA,
    PAGE,
    Entry,
    entries,
    render,
    render_json_schema,
)
from megarl.config.load import read_yaml

ROOT = Path(__file__).parents[3]
SCHEMA = json.loads(render_json_schema())
VALIDATOR = jsonschema.Draft202012Validator(SCHEMA)
# The files that a run is composed of; those of configs/study list runs.
FILES = sorted(path for group in ("run", "model", "algo") for path in (ROOT / "configs" / group).glob("*.yaml"))


def test_the_page_is_what_the_schema_says() -> None:
    written = (ROOT / PAGE).read_text()
    assert written == render(), f"{PAGE} is stale; renew it in the repository's root: {COMMAND}"


def test_every_key_is_described() -> None:
    undescribed = [entry.key for entry in entries() if not entry.description]
    assert not undescribed, f"add a comment above or beside these fields in megarl/config/schema.py: {undescribed}"


def test_entries() -> None:
    found = {entry.key: entry for entry in entries()}
    assert found["actor.optimizer.betas"] == Entry(
        key="actor.optimizer.betas",
        expects="a list of 2 float; in [0, 1)",
        default="`[0.9, 0.95]`",
        description="Decay of the two moments.",
    )
    assert found["model.vocab_multiple"].description == "Vocabulary rows are padded to a multiple of this × tp."
    assert found["data.train[i].path"].default == "required"
    assert found["sync.verify"].default == "`false`"
    assert found["data.train"].default == "`[]`"
    assert found["logging.profile_steps"].default == "`null`"
    assert found["trainer.mismatch_gate_nats"].description.count("\\|") == 2


def test_the_json_schema_is_what_the_classes_say() -> None:
    written = (ROOT / JSON_SCHEMA).read_text()
    assert written == render_json_schema(), f"{JSON_SCHEMA} is stale; renew it in the repository's root: {COMMAND}"


def test_the_json_schema_is_one() -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_a_file_of_configs_fits_the_json_schema(path: Path) -> None:
    VALIDATOR.validate(read_yaml(path))


@pytest.mark.parametrize("path", [path for path in FILES if path.parent.name == "run"], ids=lambda path: path.name)
def test_a_run_file_names_the_json_schema(path: Path) -> None:
    comment, _, name = path.read_text().splitlines()[0].partition("=")
    assert comment == "# yaml-language-server: $schema"
    assert (path.parent / name).resolve() == ROOT / JSON_SCHEMA


def test_the_defaults_fit_the_json_schema() -> None:
    VALIDATOR.validate(json.loads(json.dumps(asdict(Config()))))


@pytest.mark.parametrize(
    "tree",
    [
        {"trainer": {"total_step": 3}},
        {"trainer": {"total_steps": -1}},
        {"trainer": {"total_steps": 1.5}},
        {"rollout": {"top_k": 0}},
        {"rollout": {"temperature": 0.0}},
        {"model": {"dtype": "float16"}},
        {"actor": {"optimizer": {"betas": [0.9]}}},
        {"actor": {"optimizer": {"betas": [0.9, 1.0]}}},
        {"critic": {"layout": {"tp": 0}}},
        {"data": {"train": [{"weight": 1.0}]}},
        {"rewards": {"hybrid": {"parts": {"judge": {"manager": "rule", "weight": 0}}}}},
        {"rewards": {"code": {"limits": {"files": 0}}}},
    ],
)
def test_what_does_not_fit_the_json_schema(tree: dict[str, Any]) -> None:
    with pytest.raises(jsonschema.ValidationError):
        VALIDATOR.validate(tree)


def test_what_fits_the_json_schema() -> None:
    tree = {
        "use": {"model": "qwen3-tiny"},
        "rollout": {"top_k": -1},
        "critic": {"layout": {"tp": 2}, "value_clip": None},
        "data": {"train": ["a.parquet", {"path": "b.parquet", "weight": 2}], "chat_template": {"a": [1, None]}},
        "rewards": {"hybrid": {"parts": {"judge": {"manager": "rule", "weight": -1}}}},
    }
    VALIDATOR.validate(tree)
    key = SCHEMA["properties"]["rollout"]["properties"]["temperature"]
    assert {**key, "description": ""} == {"type": "number", "exclusiveMinimum": 0, "default": 1.0, "description": ""}
