"""What the site lists from the code is also found by a command."""

import re

import pytest

from megarl.cli import main
from megarl.config.explain import metric_sections, search
from megarl.errors import ConfigError
from megarl.migrate.aliases import ABSENT, ALIASES, explain_option
from tools.peer_tables import render_peers
from tools.site_hooks import render_metrics

# Settings of earlier versions of megarl, which no other framework has.
OURS = ("sync.transport",)


def test_every_option_of_other_trainers_is_listed_and_found() -> None:
    listed = set(render_peers().replace(", ", " ").split())
    for name in (*ALIASES, *ABSENT):
        assert name in OURS or f"`{name}`" in listed
        assert explain_option(name)


@pytest.mark.parametrize(
    ("option", "expected"),
    [
        ("verl:actor.optim.lr", ["actor_rollout_ref.actor.optim.lr: verl's name for 'actor.optimizer.lr'"]),
        (
            "VERL:optim.lr",
            [
                "actor_rollout_ref.actor.optim.lr: verl's name for 'actor.optimizer.lr'",
                "critic.optim.lr: verl's name for 'critic.optimizer.lr'",
            ],
        ),
        ("openrlhf:--critic_learning-rate", ["critic_learning_rate: OpenRLHF's name for 'critic.optimizer.lr'"]),
    ],
)
def test_an_option_is_explained(option: str, expected: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    main(["explain-option", option])
    assert [line.partition(" (")[0] for line in capsys.readouterr().out.splitlines()] == expected


def test_an_unknown_option_is_answered_with_one_alike() -> None:
    with pytest.raises(ConfigError, match=r"no table has 'verl:critic.optimm.lr'; did you mean 'critic\.optim\.lr'"):
        explain_option("verl:critic.optimm.lr")


@pytest.mark.parametrize(
    ("words", "name"),
    [
        ("group size", "rollout.num_samples"),
        ("qwen3-8b H100", "use.model=qwen3-8b"),
        ("effective_sample", None),
        ("staleness largest", "staleness/lag_mean, staleness/lag_max"),
    ],
)
def test_settings_files_and_metrics_are_found_by_words(words: str, name: str | None) -> None:
    if name is None:
        with pytest.raises(ConfigError, match="try a part of the word"):
            search(words)
    else:
        assert name in [line.partition("  ")[0] for line in search(words)]


def test_every_metric_is_on_its_page() -> None:
    page = render_metrics()
    names = [name for _, section in metric_sections() for name in section["metrics"]]
    assert len(re.findall(r"^\| `", page, re.MULTILINE)) == len(names) > 60
