"""Which commands and parts of a run read images, and what is refused at the start because it would not."""

from pathlib import Path

import pytest

from megarl.config import load_config
from megarl.config.check import TRAINING_CHECKS, check_session
from megarl.errors import ConfigError

RUNS = Path(__file__).parents[3] / "configs/run"
IMAGES = "data.image_key=images"


@pytest.mark.parametrize(
    ("command", "run", "overrides"),
    [
        ("train", "squares-rl", ()),
        ("train", "squares-rl", ("environment.default=tools",)),
        ("train", "squares-rl", ("use.algo=luffy",)),
        ("sft", "squares-sft", ()),
        ("train-preference", "sums-dpo", (IMAGES, "actor.vision.train=all")),
        ("session", "squares-rl", ()),
    ],
)
def test_images_are_read(command: str, run: str, overrides: tuple[str, ...]) -> None:
    check = check_session if command == "session" else TRAINING_CHECKS[command]
    check(load_config(RUNS / f"{run}.yaml", overrides))


@pytest.mark.parametrize(
    ("command", "run", "overrides", "message"),
    [
        ("train-reward", "sums-reward", (IMAGES,), "but a reward model reads conversations as texts"),
        ("train", "squares-rl", ("use.algo=cpo",), "algo.cpo.method, whose hints make other prompts"),
        ("train", "sums-rl-reward-model", (IMAGES,), "with a reward model, which reads conversations as texts"),
        ("train", "sums-rl", ("actor.vision.train=all",), "but data.image_key is null, so that no image is read"),
        ("train-preference", "sums-dpo", ("actor.vision.train=all",), "so that no image is read"),
    ],
)
def test_what_reads_no_images_is_refused(command: str, run: str, overrides: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TRAINING_CHECKS[command](load_config(RUNS / f"{run}.yaml", overrides))
