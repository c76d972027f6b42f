"""Unknown keys are answered with the key that was meant."""

import pytest

from megarl.config import Config, from_dict
from megarl.config.suggest import suggest_keys
from megarl.errors import ConfigError

KNOWN = (
    "trainer",
    "trainer.total_steps",
    "trainer.prompts_per_step",
    "trainer.num_epochs",
    "actor",
    "actor.layout",
    "actor.layout.tp",
    "actor.warmup_steps",
    "rollout",
    "rollout.num_samples",
    "rollout.engine",
    "rollout.engine.gpu_memory_share",
    "validation",
    "validation.num_samples",
)


def suggest(dotted: str) -> list[str]:
    path, _, key = dotted.rpartition(".")
    return suggest_keys(key, path, KNOWN)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        # A word in common beside it counts more than letters elsewhere: "tp" is in "step".
        ("trainer.step", ["trainer.total_steps"]),
        ("trainer.steps", ["trainer.total_steps"]),
        ("trainer.prompts", ["trainer.prompts_per_step"]),
        ("trainer.totel_steps", ["trainer.total_steps"]),
        # The very name elsewhere counts more than a similar one beside it.
        ("trainer.num_samples", ["rollout.num_samples", "validation.num_samples"]),
        ("trainer.tp", ["actor.layout.tp"]),
        # Nothing beside it: all of the tree, the same section first.
        ("actor.layout.steps", ["actor.warmup_steps"]),
        ("rollout.steps", ["trainer.total_steps"]),
        ("rollout.gpu_memory", ["rollout.engine.gpu_memory_share"]),
        ("rollout.num_sampling", ["rollout.num_samples"]),
        ("trainr", ["trainer"]),
        # Elsewhere, names must be nearer than "tp" and "temp" are.
        ("rollout.temp", []),
        # A word in common elsewhere counts more than some letters beside it.
        ("trainer.engines", ["rollout.engine"]),
        # "num" is in common, and says nothing.
        ("rollout.num_gpus", []),
        ("xyzzy", []),
    ],
)
def test_suggestion(given: str, expected: list[str]) -> None:
    assert suggest(given) == expected


def test_the_message_of_the_real_tree() -> None:
    with pytest.raises(ConfigError) as caught:
        from_dict(Config, {"trainer": {"step": 3}})
    assert str(caught.value) == "unknown key 'trainer.step'; did you mean 'trainer.total_steps'?"
