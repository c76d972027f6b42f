"""Define the sections of rewards that come from services over HTTP, and of mixtures of several managers' rewards."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from megarl.config.judges import check_fallback
from megarl.config.setting import ANY_NUMBER, AT_LEAST_0, AT_LEAST_1, POSITIVE, URL, Range, setting
from megarl.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteConfig:
    """Configure a reward service over HTTP in OpenRLHF's format, such as `megarl serve-reward`."""

    # URLs of equivalent services, among which rows are distributed.
    urls: tuple[str, ...] = setting((), URL, needs_trust=True)
    # Environment variable that holds the key of the services; null: none is sent.
    api_key_env: str | None = setting(None, needs_trust=True)
    # Rows of one request. A request is sent as soon as this many samples have finished, and once more for the
    # remainder.
    rows_per_request: int = setting(16, AT_LEAST_1)
    timeout_s: float = setting(30.0, POSITIVE)  # Time limit of one request, from connecting to the last byte.
    # Number of times that a request which failed at every service is tried again at all of them.
    retries: int = setting(3, AT_LEAST_0)
    # Delay before the first retry; it doubles each time, with a random jitter of ±50 %.
    backoff_s: float = setting(0.5, AT_LEAST_0)
    # If no service answers. raise: end the run; drop_rows: train without the rows; value: reward them with `value`.
    on_error: Literal["raise", "drop_rows", "value"] = "drop_rows"
    value: float | None = setting(None, ANY_NUMBER)  # Reward of rows without an answer, with on_error=value.

    def check(self, key: str) -> None:
        """Raise ConfigError for a `value` that `on_error` does not read, and for the key of no service."""
        check_fallback(key, self.on_error, self.value)
        if self.api_key_env is not None and not self.urls:
            raise ConfigError(f"{key}.api_key_env: is set, but {key}.urls is empty; list the services, or remove it")


@dataclass(frozen=True, slots=True, kw_only=True)
class HybridPartConfig:
    """Define one part of a mixture of rewards, under a name of your choice: weight × transform(a manager's reward)."""

    # Who gives the term's reward; see rewards.manager.
    manager: Literal["rule", "remote", "model", "judge", "environment"]
    weight: float = setting(1.0, Range(expected="not 0; leave the part out", never=0))  # Weight of the term.
    # Transform of the term's reward r. identity: r; sigmoid: 1 / (1 + e^−r); group_zscore, batch_zscore: z-score
    # within the prompt's group, or within all rows of the batch that the term judged; clip: r within `clip`.
    transform: Literal["identity", "sigmoid", "group_zscore", "batch_zscore", "clip"] = "identity"
    clip: tuple[float, float] | None = None  # Lower and upper bound, with transform=clip.
    # With manager=remote: URLs of the term's own services; []: those of rewards.remote.
    urls: tuple[str, ...] = setting((), URL, needs_trust=True)
    # With urls: environment variable that holds their key; null: none is sent.
    api_key_env: str | None = setting(None, needs_trust=True)
    judge: str | None = None  # With manager=judge: the entry of rewards.judges; null: the only one.

    def check(self, key: str) -> None:
        """Raise ConfigError for settings that neither the manager nor the transform reads."""
        if key.endswith(".rule") and self.manager != "rule":
            raise ConfigError(f"{key}.manager: got {self.manager!r}, but rule is the rule's name in metrics; rename it")
        if (self.transform == "clip") != (self.clip is not None):
            given = "is not set" if self.clip is None else f"got {list(self.clip)}"
            raise ConfigError(
                f"{key}.clip: {given}, but {key}.transform={self.transform}; transform=clip takes [low, high], other "
                "transforms take none"
            )
        if self.clip is not None and self.clip[0] >= self.clip[1]:
            raise ConfigError(f"{key}.clip: got {list(self.clip)}, expected [low, high] with low < high")
        if self.urls and self.manager != "remote":
            raise ConfigError(f"{key}.urls: are set, but {key}.manager={self.manager} calls no service; remove them")
        if self.api_key_env is not None and not self.urls:
            raise ConfigError(f"{key}.api_key_env: is set, but {key}.urls is empty; set rewards.remote.api_key_env")
        if self.judge is not None and self.manager != "judge":
            raise ConfigError(f"{key}.judge: is set, but manager={self.manager}; remove it")


@dataclass(frozen=True, slots=True, kw_only=True)
class HybridConfig:
    """Define a mixture of reward managers: a row's reward is the sum of the parts routed to its data source."""

    parts: Mapping[str, HybridPartConfig] = field(default_factory=dict)  # Terms of the mixture by name.
    # Names of the terms that apply to a data source; sources that are not listed get all terms.
    routes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def check(self, key: str) -> None:
        """Raise ConfigError for two parts by what a run has once, and for routes that do not lead to parts."""
        for manager in ("rule", "model"):
            names = [name for name, part in self.parts.items() if part.manager == manager]
            if len(names) > 1:
                raise ConfigError(
                    f"{key}.parts: {' and '.join(names)} both have manager={manager}, of which a run has one; merge "
                    "them, with the sum of their weights"
                )
        for source, route in self.routes.items():
            where = f"{key}.routes.{source}"
            if not route:
                raise ConfigError(f"{where}: is empty, so nobody would judge this source; name parts of {key}.parts")
            if unknown := [name for name in route if name not in self.parts]:
                raise ConfigError(
                    f"{where}: got {unknown[0]!r}, expected parts of {key}.parts: {', '.join(self.parts)}"
                )
            if len(set(route)) < len(route):
                raise ConfigError(f"{where}: got {list(route)}, expected each part once; set its weight in {key}.parts")
