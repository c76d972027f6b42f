"""Every option name that users of verl, OpenRLHF and LUFFY may bring gets an answer."""

import re
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

from megarl.config import Config
from megarl.migrate.aliases import ABSENT, ALIASES, find_alias
from tests.unit.migrate.test_aliases import keys_of

# The names of verl 0.3.0, 0.6.1 and 0.9.1 with its DAPO and asynchronous recipes, of OpenRLHF before and in 0.11.2
# (with and without dots), of LUFFY's trainer, and those of adapters and distillation elsewhere; one on each line.
OPTIONS = {path.stem: path.read_text().split() for path in (Path(__file__).parent / "peer_options").glob("*.txt")}
KEYS = frozenset(keys_of(Config))


@pytest.mark.parametrize("peer", OPTIONS)
def test_every_name_is_a_key_here_or_is_answered(peer: str) -> None:
    assert [name for name in OPTIONS[peer] if name not in KEYS and find_alias(name) is None] == []


def test_patterns_cover_no_key() -> None:
    assert [(pattern, key) for pattern in ABSENT for key in KEYS if fnmatchcase(key, pattern)] == []


def test_every_pattern_answers_something() -> None:
    names = [name for options in OPTIONS.values() for name in options]
    unused = [pattern for pattern in ABSENT if not any(fnmatchcase(name, pattern) for name in names)]
    assert unused == []


@pytest.mark.parametrize(
    ("name", "feature"),
    [
        ("async_training.staleness_threshold", "asynchronous training"),
        ("async_training.anything", "asynchronous training"),
        ("async_train", "asynchronous training"),
        ("train.async_enable", "asynchronous training"),
        ("actor_rollout_ref.rollout.multi_turn.enable", "multi-turn"),
        ("agent_func_path", "multi-turn"),
        ("critic.model.lora_rank", "adapters"),
        ("actor_rollout_ref.model.lora.dropout", "dropout"),
        ("lora_dropout", "dropout"),
        ("ds.load_in_4bit", "quantised base"),
        ("actor.lora.use_dora", "more than"),
        ("actor_rollout_ref.model.mtp.enable", "multi-token prediction"),
        ("data.image_patch_size", "images"),
        ("distillation.nnodes", "engines of a teacher"),
        ("normalize_reward", "normalisation of rewards"),
    ],
)
def test_a_missing_feature_is_named_and_points_to_no_key(name: str, feature: str) -> None:
    found = find_alias(name)
    assert found is not None
    assert found[1].unsupported
    assert found[1].key == ""
    assert feature in found[1].advice
    assert "not supported here" in found[1].advice


def test_notes_name_only_keys_that_exist() -> None:
    sections = {key.split(".")[0] for key in KEYS if "." in key} - {"data", "trainer", "critic", "actor"}
    named = {
        word.rstrip(".")
        for alias in (*ALIASES.values(), *ABSENT.values())
        for word in re.findall(r"(?<![\w./_])[a-z_]+(?:\.[a-z_0-9]+)+", alias.note)
        if word.split(".")[0] in sections
    }
    assert sorted(named - KEYS) == []
