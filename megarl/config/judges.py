"""Define the entries of `rewards.judges`: language models that judge responses in words. See docs/rewards/judges.md."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from megarl.config.setting import ANY_NUMBER, AT_LEAST_0, AT_LEAST_1, POSITIVE, SHARE, URL, Range, section, setting
from megarl.errors import ConfigError
from megarl.host.masking import require_no_secrets


@dataclass(frozen=True, slots=True, kw_only=True)
class CriterionConfig:
    """Define one criterion of a rubric."""

    text: str  # The judge reads this about the criterion.
    weight: float = setting(1.0, ANY_NUMBER)  # Factor of its score in the reward.


@dataclass(frozen=True, slots=True, kw_only=True)
class VerdictConfig:
    """Configure how a verdict is read from what a judge writes."""

    # pattern: the first group of the last match of `pattern`; json: entries of the last JSON object.
    form: Literal["pattern", "json"] = "pattern"
    # Regular expression with a group around the verdict, ignoring case; null: "Score: NUMBER" or, with
    # mode=pairwise, "Winner: A, B or tie".
    pattern: str | None = None
    key: str = "score"  # With form=json: key of the verdict; with criteria, their names are the keys.
    # Numbers that words stand for, such as {yes: 1, no: 0}; case does not matter. {}: verdicts are numbers; with
    # mode=pairwise, {a: 1, b: 0, tie: 0.5}.
    labels: Mapping[str, float] = section(dict, ANY_NUMBER)
    # Lowest and highest verdict, which become 0 and 1; a verdict beyond them is not read. null: take it as it is.
    scale: tuple[float, float] | None = None

    def check(self, key: str) -> None:
        """Raise ConfigError for a pattern that finds no verdict, and for a scale without a length."""
        if self.pattern is not None:
            if self.form == "json":
                raise ConfigError(f"{key}.pattern: is set, but verdict.form=json reads no pattern; remove it")
            try:
                num_groups = re.compile(self.pattern).groups
            except re.error as error:
                raise ConfigError(f"{key}.pattern: got {self.pattern!r}: {error}; correct it") from error
            if num_groups != 1:
                raise ConfigError(
                    f"{key}.pattern: got {num_groups} groups in {self.pattern!r}, expected one, around the verdict; "
                    "write others as (?:...)"
                )
        if self.scale is not None and not self.scale[0] < self.scale[1]:
            raise ConfigError(f"{key}.scale: got {list(self.scale)}, expected [low, high] with low < high")


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingConfig:
    """Configure how a judge is sampled."""

    temperature: float = setting(0.0, AT_LEAST_0)  # 0: greedy.
    top_p: float = setting(1.0, SHARE)
    max_tokens: int = setting(1024, AT_LEAST_1)  # Limit of what the judge may write.
    votes: int = setting(1, AT_LEAST_1)  # How often each question is asked, each time with another seed.
    combine: Literal["mean", "median", "majority"] = "mean"  # Statistic of the votes; majority: the most frequent one.
    # Further fields of each request, such as {chat_template_kwargs: {enable_thinking: false}}.
    extra_body: Mapping[str, Any] = field(default_factory=dict)

    def check(self, key: str) -> None:
        """Raise ConfigError for several votes that would all be the same."""
        if self.votes > 1 and self.temperature == 0:
            raise ConfigError(
                f"{key}.votes: got {self.votes} with temperature=0, which would be the same vote again; raise the "
                "temperature"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointConfig:
    """Configure how a judge's model is reached over HTTP."""

    # Base URLs of equivalent OpenAI-compatible endpoints, such as http://host:8000/v1.
    urls: tuple[str, ...] = setting((), URL)
    model: str | None = None  # Name of the model there; null: the first that the endpoint lists.
    api_key_env: str | None = None  # Environment variable that holds the API key; null: none is sent.
    use_proxy: bool = True  # Whether HTTP_PROXY, HTTPS_PROXY and NO_PROXY hold, as for agents and MCP servers.
    concurrency: int = setting(64, AT_LEAST_1)  # Largest number of requests under way.
    timeout_s: float = setting(120.0, POSITIVE)  # Time limit of one attempt.
    # Further attempts at each endpoint after no answer or status 408, 409, 429 or 5xx, with growing delays.
    retries: int = setting(3, AT_LEAST_0)


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgeServerConfig:
    """Configure a model that the run serves with vLLM for its judges, on devices that nothing else uses."""

    model: str  # Hugging Face directory or hub id of the model.
    replicas: int = setting(1, AT_LEAST_1)  # Number of servers of this model.
    tp: int = setting(1, AT_LEAST_1)  # Tensor-parallel size: devices per server.
    num_nodes: int = setting(1, AT_LEAST_1)  # Number of nodes that the replicas are spread over evenly.
    # Further flags of vllm serve, without dashes, such as {max-model-len: 16384, reasoning-parser: qwen3}.
    args: Mapping[str, Any] = field(default_factory=dict)
    # Names of environment variables that the servers get besides the usual ones, such as [HF_TOKEN] for a model of the
    # hub that asks for it.
    pass_env: tuple[str, ...] = setting((), needs_trust=True)

    def check(self, key: str) -> None:
        """Raise ConfigError for secrets on a command line, and for replicas that do not spread evenly."""
        require_no_secrets(self.args, f"{key}.args")
        if self.replicas % self.num_nodes:
            raise ConfigError(f"{key}.num_nodes: got {self.num_nodes}, expected a divisor of replicas={self.replicas}")


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetConfig:
    """Limit what a judge may cost; reaching a limit ends the run. Cached answers are free."""

    requests: int | None = setting(None, AT_LEAST_1)  # Requests since the run was started or resumed; null: no limit.
    tokens: int | None = setting(None, AT_LEAST_1)  # Tokens read and written since then; null: no limit.


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgeConfig:
    """Configure a language model that judges responses in words."""

    # pointwise: each response gets a score; pairwise: the responses to a prompt are compared, and a response's
    # score is its share of wins.
    mode: Literal["pointwise", "pairwise"] = "pointwise"
    system: str | None = None  # System message; null: none.
    # Jinja2 template of the user message; null: one that suits the other settings, see docs/rewards/judges.md.
    template: str | None = None
    criteria: Mapping[str, CriterionConfig] = field(default_factory=dict)  # A rubric, by name; {}: a single score.
    # Show the judge only what follows the last thought of a response, such as what follows </think>.
    hide_thinking: bool = True
    # With mode=pairwise: with how many others a response is compared; null: with all of its group.
    opponents: int | None = setting(None, Range(expected=">= 2 and even", at_least=2))
    verdict: VerdictConfig = section(VerdictConfig)
    sampling: SamplingConfig = section(SamplingConfig)
    # How the model is reached: endpoint.urls, server or use_policy says where it is.
    endpoint: EndpointConfig = section(EndpointConfig)
    server: str | None = None  # Name of an entry of rewards.judge_servers, which the run starts.
    use_policy: bool = False  # Ask the policy itself, with the weights that it has at the moment, on the run's engines.
    cache: str | None = None  # SQLite file that keeps answers for later runs; null: none.
    budget: BudgetConfig = section(BudgetConfig)
    # If the model does not answer, or no verdict can be read. raise: end the run; drop_rows: train without the rows;
    # value: reward them with `value`.
    on_error: Literal["raise", "drop_rows", "value"] = "drop_rows"
    value: float | None = setting(None, ANY_NUMBER)  # Reward of rows without a verdict, with on_error=value.
    correct_from: float = setting(0.5, ANY_NUMBER)  # Reward above which a response is correct, where no rule decides.
    dry_run: bool = True  # Ask about one prompt before the run starts; false: do not.

    def check(self, key: str) -> None:
        """Raise ConfigError unless one setting says where the model is, and the others suit it and the mode."""
        places = {
            "endpoint.urls": bool(self.endpoint.urls),
            "server": self.server is not None,
            "use_policy": self.use_policy,
        }
        if sum(places.values()) != 1:
            given = " and ".join(name for name, is_set in places.items() if is_set) or "none"
            raise ConfigError(
                f"{key}: got {given} of {', '.join(places)}, expected one, which says where the model is, as in "
                "endpoint: {urls: [http://host:8000/v1]}"
            )
        limits = (self.cache, self.budget.requests, self.budget.tokens)
        if self.use_policy and (any(each is not None for each in limits) or self.sampling.extra_body):
            raise ConfigError(
                f"{key}.use_policy: got true with cache, budget or sampling.extra_body, which endpoints have; remove "
                "them"
            )
        verdict, pairwise = self.verdict, self.mode == "pairwise"
        if self.opponents is not None and (not pairwise or self.opponents % 2):
            raise ConfigError(
                f"{key}.opponents: got {self.opponents}, expected an even number, with mode=pairwise only"
            )
        if pairwise and (verdict.scale is not None or any(not 0 <= value <= 1 for value in verdict.labels.values())):
            raise ConfigError(
                f"{key}.verdict: with mode=pairwise, labels are A's share of a win, from 0 to 1, and there is no scale"
            )
        if self.sampling.combine != "mean" and (pairwise or self.sampling.votes == 1):
            raise ConfigError(
                f"{key}.sampling.combine: got {self.sampling.combine!r}, expected 'mean' with mode=pairwise or one vote"
            )
        check_fallback(key, self.on_error, self.value)


def check_fallback(key: str, on_error: str, value: float | None) -> None:
    """Raise ConfigError unless the section `key` has a `value` exactly if `on_error` is `value`."""
    if (on_error == "value") != (value is not None):
        given = "is not set" if value is None else f"got {value}"
        raise ConfigError(
            f"{key}.value: {given}, but {key}.on_error={on_error}; on_error=value takes a number, other choices take "
            "none"
        )
