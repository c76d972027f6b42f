"""Let settings name models by their ids on the Hugging Face hub: the files are downloaded once, before a run starts."""

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megarl.errors import ConfigError

if TYPE_CHECKING:
    from megarl.config.schema import Config

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


def with_local_models(config: "Config", *, weights: bool = True, judges: bool = False) -> "Config":
    """Return the configuration with a local directory in the place of every model that is named by its hub id.

    weights: whether to download the weights too. Without them, `model.config_path` spares `model.path` the download.
    judges: whether to download the models of judge servers too.
    """

    def local(name: str, key: str) -> str:
        if key == "model.path" and not weights and config.model.config_path is not None:
            return name
        return local_model(name, key, weights=weights)

    return with_models(config, local, judges=judges)


def commits_of(config: "Config") -> dict[str, str]:
    """Return the commits of a configuration's hub models, by setting and id (`model.path: Qwen/Qwen3-8B`)."""
    commits = {}

    def collect(path: str, key: str) -> str:
        if found := _CACHED.fullmatch(path):
            commits[f"{key}: {found['id'].replace('--', '/')}"] = found["commit"]
        return path

    with_models(config, collect, judges=True)
    return commits


def with_recorded_commits(config: "Config", commits: Mapping[str, str]) -> "Config":
    """Return the configuration with the commits that `commits_of` found behind those hub ids that name no revision."""

    def pinned(name: str, key: str) -> str:
        commit = commits.get(f"{key}: {name}")
        return name if commit is None else f"{name}@{commit}"

    return with_models(config, pinned, judges=True)


def with_models(config: "Config", change: Callable[[str, str], str], *, judges: bool) -> "Config":
    """Return the configuration with another name for each of its models; `change` gets the name and its key."""
    changed: dict[str, Any] = {"model": replace(config.model, path=change(config.model.path, "model.path"))}
    for role in ("reference", "teacher", "critic", "reward_model"):
        section = getattr(config, role)
        if section.model_path is not None:
            changed[role] = replace(section, model_path=change(section.model_path, f"{role}.model_path"))
    changed["teachers"] = {
        name: replace(each, model_path=change(each.model_path, f"teachers.{name}.model_path"))
        if each.model_path is not None
        else each
        for name, each in config.teachers.items()
    }
    if judges:
        servers = {
            name: replace(server, model=change(server.model, f"rewards.judge_servers.{name}.model"))
            for name, server in config.rewards.judge_servers.items()
        }
        changed["rewards"] = replace(config.rewards, judge_servers=servers)
    return replace(config, **changed)


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
