"""Let settings name models by their ids on the Hugging Face hub: the files are downloaded once, before a run starts."""

import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from megarl.errors import ConfigError

if TYPE_CHECKING:
    from megarl.config.schema import Config

_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*")
_WEIGHTS = "*.safetensors"
# What a model's directory has besides weights: config, generation settings, tokenizer and chat template.
_SMALL_FILES = ("*.json", "*.jinja", "*.txt", "*.model")
# Other formats of the same weights lie in folders.
_IGNORED = "*/*"


def with_local_models(config: "Config", *, weights: bool = True) -> "Config":
    """Return the configuration with a local directory in the place of every model that is named by its hub id.

    weights: whether to download the weights too. Without them, `model.config_path` spares `model.path` the download.
    """
    model, roles = config.model, {}
    if weights or model.config_path is None:
        model = replace(model, path=local_model(model.path, "model.path", weights=weights))
    for name in ("reference", "critic", "reward_model"):
        section = getattr(config, name)
        if section.model_path is not None:
            path = local_model(section.model_path, f"{name}.model_path", weights=weights)
            roles[name] = replace(section, model_path=path)
    return replace(config, model=model, **roles)


def local_model(name: str, key: str, *, weights: bool = True) -> str:
    """Return `name` if it is a path, or else the local directory of the hub's model of this id, downloaded if need be.

    A path that exists is never an id. Files that an earlier download left in the hub's cache are used again, also
    without a connection. key: the setting that names the model, for messages. weights: whether to download the weights,
    too.

    Raises:
        ConfigError: the hub cannot be reached and the cache lacks the model, or the hub has no such model.
    """
    if Path(name).exists() or not _ID.fullmatch(name):
        return name
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import RepositoryNotFoundError

    hub, cache = constants.ENDPOINT, constants.HF_HUB_CACHE
    patterns = [*_SMALL_FILES, _WEIGHTS] if weights else list(_SMALL_FILES)
    try:
        return snapshot_download(name, allow_patterns=patterns, ignore_patterns=[_IGNORED])
    # Which errors stand for a lost connection depends on the version of the hub's client.
    except Exception as error:
        if isinstance(error, RepositoryNotFoundError):
            problem = f"{hub} has no model of this id, or shows it only to holders of a token (HF_TOKEN)"
        else:
            reason = next(iter(str(error).splitlines()), type(error).__name__)
            problem = f"downloading it from {hub} (HF_ENDPOINT) to {cache} (HF_HOME) failed: {reason}"
        raise ConfigError(
            f"{key}: got {name!r}, which is no directory here, and as the id of a model: {problem}. Correct it; or, "
            f"where the hub can be reached, run `huggingface-cli download {name} --local-dir DIR` (`hf download` in "
            f"newer versions), and set {key}=DIR"
        ) from error
