"""Let settings name models by their ids on the Hugging Face hub: the files are downloaded once, before a run starts."""

import re
from collections.abc import Mapping
from pathlib import Path

from megarl.errors import ConfigError

# As in the hub's own hf:// paths.
_ID = re.compile(r"(?P<id>\w[\w.-]*/\w[\w.-]*)(@(?P<revision>\w[\w./-]*))?")
# How the hub's cache names the directory of a commit.
_CACHED = re.compile(r".*/models--(?P<id>[^/]+)/snapshots/(?P<commit>[0-9a-f]{40})/?")
_WEIGHTS = "*.safetensors"
# A model's directory has these besides weights: configuration, tokenizer, templates, code, licences.
SMALL_FILES = (
    *("*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken", "*.py", "additional_chat_templates/*.jinja"),
    *("LICEN[CS]E*", "NOTICE*", "USE_POLICY*"),
)
# Other formats of the same weights lie in folders, as further templates do.
_IGNORED = [f"*/*{end}" for end in (".safetensors", ".json", ".txt", ".model", ".tiktoken", ".py")]


def commits_of(models: Mapping[str, str]) -> dict[str, str]:
    """Return the commits of those models that come from the hub, by key and id (`model.path: Qwen/Qwen3-8B`).

    models: as `config.model_names.models_of` returns them.
    """
    found = {key: _CACHED.fullmatch(path) for key, path in models.items()}
    return {f"{key}: {each['id'].replace('--', '/')}": each["commit"] for key, each in found.items() if each}


def local_model(name: str, key: str, *, weights: bool = True) -> str:
    """Return `name` if it is a path, or else the local directory of the hub's model of this id, downloaded if need be.

    A path that exists is never an id. An id may end with @ and a branch, tag or commit; otherwise it stands for the
    branch main. Files that an earlier download left in the hub's cache are used again, also without a connection.
    key: the setting that names the model, for messages. weights: whether to download the weights, too.

    Raises:
        ConfigError: the hub cannot be reached and the cache lacks the model, or the hub has no such model or revision.
    """
    if Path(name).exists() or not (named := _ID.fullmatch(name)):
        return name
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError

    hub, cache = constants.ENDPOINT, constants.HF_HUB_CACHE
    patterns = [*SMALL_FILES, _WEIGHTS] if weights else list(SMALL_FILES)
    try:
        return snapshot_download(
            named["id"], revision=named["revision"], allow_patterns=patterns, ignore_patterns=_IGNORED
        )
    # Which errors stand for a lost connection depends on the version of the hub's client.
    except Exception as error:
        if isinstance(error, RepositoryNotFoundError):
            problem = f"{hub} has no model of this id, or shows it only to holders of a token (HF_TOKEN)"
        elif isinstance(error, RevisionNotFoundError):
            problem = f"{hub} has no branch, tag or commit {named['revision'] or 'main'} of it"
        else:
            reason = next(iter(str(error).splitlines()), type(error).__name__)
            problem = f"downloading it from {hub} (HF_ENDPOINT) to {cache} (HF_HOME) failed: {reason}"
        raise ConfigError(
            f"{key}: got {name!r}, which is not a directory here, and as the id of a model: {problem}. Correct it; or, "
            f"where the hub can be reached, run `huggingface-cli download {named['id']} --local-dir DIR` "
            f"(`hf download` in newer versions), and set {key}=DIR"
        ) from error
