"""Check that every part of a run that reads prompts also reads their images."""

from megarl.config.check_distill import teachers_of
from megarl.config.schema import Config
from megarl.errors import ConfigError


def check_no_images(config: Config) -> None:
    """Raise ConfigError for a reward model's training, if its pairs are to have images."""
    if config.data.image_key is not None:
        raise ConfigError(
            f"data.image_key: got {config.data.image_key}, but a reward model reads conversations as texts; set it to "
            "null, and leave out rows with images"
        )


def check_images(config: Config, *, trains: bool = True) -> None:
    """Raise ConfigError for images that a part of a run would not read, and for a tower that is trained on none."""
    blind = {
        "a reward model, which reads conversations as texts": config.rewards.uses("model"),
        "algo.cpo.method, whose hints make other prompts": trains and config.algo.cpo.method != "none",
        "algo.distill.teacher=hint, which makes other prompts": trains and config.algo.distill.teacher == "hint",
        "a teacher behind a server, which gets token ids alone": trains
        and any(t.servers for t in teachers_of(config).values()),
    }
    if trains and config.data.image_key is None and (train := config.actor.vision.train) != "none":
        raise ConfigError(
            f"actor.vision.train: got {train}, but data.image_key is null, so that no image is read; set either"
        )
    if config.data.image_key is not None and (found := next((what for what, there in blind.items() if there), None)):
        raise ConfigError(
            f"data.image_key: got {config.data.image_key} with {found}; set it to null, or leave the other out"
        )
