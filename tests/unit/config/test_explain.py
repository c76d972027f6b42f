"""`megarl train --explain` says what a key means, and the shell completes keys and their values."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from megarl.config.explain import complete_override, explain
from megarl.config.load import from_dict
from megarl.config.schema import Config
from megarl.errors import UnknownKeyError
from megarl.migrate.aliases import answered

REPOSITORY = Path(__file__).parents[3]


def test_a_key_has_its_meaning_range_default_and_value() -> None:
    config = from_dict(Config, {"rollout": {"num_samples": 16}})
    name, *about = explain("rollout.num_samples", config).splitlines()
    assert name == "rollout.num_samples"
    assert [line.split(maxsplit=1) for line in about[-3:]] == [
        ["expects", "int; >= 1"],
        ["default", "8"],
        ["here", "16"],
    ]
    assert "group size" in about[0]


def test_entries_of_mappings_are_found_by_any_name_and_may_be_absent() -> None:
    config = from_dict(Config, {"environment": {"entries": {"weather": {"type": "tools"}}}})
    assert explain("environment.entries.weather.type", config).endswith("here     tools")
    assert explain("environment.entries.game.type", config).endswith("here     not set")


def test_a_section_lists_its_keys_and_the_sections_within() -> None:
    lines = explain("actor").splitlines()
    assert lines[0].startswith("actor.recompute ")
    assert "actor.optimizer.…" in lines


@pytest.mark.parametrize(
    ("key", "advice"),
    [
        ("rollout.num_sample", "did you mean 'rollout.num_samples'"),
        ("actor_rollout_ref.rollout.n", "verl's name for 'rollout.num_samples'"),
        ("nothing", "there are: run, model"),
    ],
)
def test_an_unknown_key_gets_the_advice_that_a_run_file_would_get(key: str, advice: str) -> None:
    with pytest.raises(UnknownKeyError) as caught:
        explain(key)
    assert advice in str(answered(caught.value))


def test_overrides_complete_to_keys_values_and_files() -> None:
    assert "rollout.schedule.on_update=" in complete_override("rollout.schedule.")
    assert complete_override("rollout.schedule.on_update=") == [
        "rollout.schedule.on_update=finish",
        "rollout.schedule.on_update=continue",
    ]
    assert complete_override("placement.offload=") == ["placement.offload=true", "placement.offload=false"]
    assert {"use.algo=cpo", "use.algo=grpo"} <= set(complete_override("use.algo="))
    assert complete_override("rollout.num_samples=") == []


def test_the_shell_is_answered_as_argcomplete_asks(tmp_path: Path) -> None:
    """The protocol of argcomplete: the line in the environment, the answers on descriptor 8."""
    line = "megarl train run.yaml rollout.schedule.st"
    answers = tmp_path / "answers"
    environment = {
        **os.environ,
        "_ARGCOMPLETE": "1",
        "_ARGCOMPLETE_IFS": "\n",
        "COMP_LINE": line,
        "COMP_POINT": str(len(line)),
        "COMP_TYPE": "9",
        "PYTHONPATH": str(REPOSITORY),
    }
    command = f"exec 8>{answers} 9>/dev/null; {sys.executable} -m megarl.cli"
    subprocess.run(["bash", "-c", command], env=environment, check=True, timeout=60)
    assert answers.read_text().split() == ["rollout.schedule.staleness="]
