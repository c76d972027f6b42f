"""Define the section `rewards`, which chooses what computes the rewards of samples. See docs/rewards.md."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from megarl.config.judges import JudgeConfig, JudgeServerConfig
from megarl.config.setting import (
    ANY_NUMBER,
    AT_LEAST_0,
    AT_LEAST_1,
    BELOW_1,
    FRACTION,
    POSITIVE,
    Range,
    section,
    setting,
)
from megarl.sandbox.options import Limits


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceConfig:
    """Configure how rule-based scorers (the manager `rule`) judge one data source; null keeps the scorer's default."""

    # Name of a data source whose scorer to use; null: this source's own scorer, or the custom function if there
    # is one.
    scorer: str | None = None
    correct: float | None = setting(None, ANY_NUMBER)  # Score of a correct answer; null: the scorer's own.
    wrong: float | None = setting(None, ANY_NUMBER)  # Score of a wrong answer; null: the scorer's own.
    # Score of a response from which no answer can be extracted; null: the scorer's own, usually that of a wrong
    # answer.
    malformed: float | None = setting(None, ANY_NUMBER)
    # ref: formulas as in the original code; doc: as in its documentation; fix: with known exploits closed; null:
    # the scorer's own.
    mode: Literal["ref", "doc", "fix"] | None = None
    # Name of a format in docs/rewards/scorers.md that contributes to the score; null: the scorer's own.
    format: str | None = None
    # Weight of the format in the score; null: the scorer's own, usually 0.
    format_weight: float | None = setting(None, BELOW_1)


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionConfig:
    """Name a reward function in a Python file, what it judges, and its weight in the reward."""

    path: str  # The Python file.
    # Name of the function. Its parameters show which library it was written for: verl, OpenRLHF or TRL.
    name: str = "reward_func"
    # Data sources that it judges; []: all that have no scorer and that no other function names. For a source with
    # a scorer in rewards.sources, the functions that name it add to the scorer's reward.
    sources: tuple[str, ...] = ()
    weight: float = setting(1.0, ANY_NUMBER)  # Factor of its reward in the sum over all functions of the source.
    # Rows of one call of a function that takes lists. row: each alone; group: all responses to a prompt; batch: all.
    per: Literal["row", "group", "batch"] = "row"
    arguments: Mapping[str, Any] = field(default_factory=dict)  # Further keyword arguments of every call.


@dataclass(frozen=True, slots=True, kw_only=True)
class CustomConfig:
    """Configure your own reward functions: one by path and name, or several under `functions`."""

    # A Python file with a function that judges all data sources without a scorer; null: none.
    path: str | None = setting(None, needs_trust=True)
    # Name of the function: OpenRLHF's reward_func(queries, prompts, labels, **kwargs), verl's
    # compute_score(data_source, solution_str, ground_truth, extra_info), or TRL's with `completions`. Its
    # parameters show which it is.
    name: str = "reward_func"
    per: Literal["row", "group", "batch"] = "row"  # As in functions.
    arguments: Mapping[str, Any] = field(default_factory=dict)  # As in functions.
    functions: Mapping[str, FunctionConfig] = section(dict, needs_trust=True)  # Functions by a name for metrics.
    # If a function raises an exception, is killed or dies. raise: end the run; drop_rows: train without the rows;
    # value: reward them with `value`. A function that fails on all rows always ends the run.
    on_error: Literal["raise", "drop_rows", "value"] = "drop_rows"
    value: float | None = setting(None, ANY_NUMBER)  # Reward by a function that failed, with on_error=value.
    dry_run: bool = True  # Call each function at the start with a prompt of each data source; false: do not.
    # Names of environment variables that the functions get besides the usual ones (docs/rewards/custom.md).
    pass_env: tuple[str, ...] = setting((), needs_trust=True)
    workers: int = setting(2, AT_LEAST_1)  # Number of processes that the functions run in.
    timeout_s: float = setting(30.0, POSITIVE)  # Time after which a call is killed.
    memory_mib: int = setting(16384, AT_LEAST_1)  # Limit on the growth of the address space of a process.

    def all_functions(self) -> dict[str, FunctionConfig]:
        """Return all functions by name, including the one that `path` and `name` set."""
        if self.path is None:
            return dict(self.functions)
        own = FunctionConfig(path=self.path, name=self.name, per=self.per, arguments=self.arguments)
        return {self.name: own, **self.functions}


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifierConfig:
    """Configure the worker processes in which rule-based scorers run."""

    workers: int = setting(2, AT_LEAST_1)  # Number of worker processes.
    # Time after which the scorer of one answer is interrupted, counted from when it starts to run.
    soft_limit_s: float = setting(2.0, POSITIVE)
    hard_limit_s: float = setting(5.0, POSITIVE)  # Time after which the scorer's process is killed and replaced.
    memory_mib: int = setting(2048, AT_LEAST_1)  # Memory limit of one process.


@dataclass(frozen=True, slots=True, kw_only=True)
class GroundTruthConfig:
    """Configure how ground truths are checked at the start: each is judged as an answer to itself."""

    # Share of a data source's ground truths that may be empty or score as wrong; a larger one ends the run.
    max_unscorable: float = setting(0.01, FRACTION)
    max_rows: int = setting(10_000, AT_LEAST_1)  # Check at most this many ground truths, spread over the data.


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeConfig:
    """Configure how programs in responses are run against tests."""

    # auto: namespaces, or else landlock, or else programs are refused; namespaces, landlock: this one alone.
    # limits_only: no isolation; programs may read and write whatever this user can.
    isolation: Literal["auto", "namespaces", "landlock", "limits_only"] = setting("auto", needs_trust=True)
    limits: Limits = section(Limits, POSITIVE, needs_trust=True)
    # Directories of packages that programs may import besides the standard library.
    import_paths: tuple[str, ...] = setting((), needs_trust=True)
    # Reward of a program: the fraction of tests that it passes, or 1 if it passes all of them and 0 otherwise.
    credit: Literal["fraction", "all_or_nothing"] = "all_or_nothing"
    # Relative and absolute tolerance for numbers with a decimal point; null: compare their digits.
    float_tolerance: float | None = setting(None, BELOW_1)
    max_tests: int | None = setting(None, AT_LEAST_1)  # Run only the first tests, at most this many; null: all.
    # After this many tests have timed out, the remaining ones count as timed out as well.
    max_timeouts: int = setting(3, AT_LEAST_1)
    workers: int = setting(2, AT_LEAST_1)  # Number of processes that run programs.
    deadline_s: float = setting(90.0, POSITIVE)  # Time limit for all tests of one response.


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteConfig:
    """Configure a reward service over HTTP in OpenRLHF's format, such as `megarl serve-reward`."""

    # URLs of equivalent services, among which rows are distributed.
    urls: tuple[str, ...] = setting((), needs_trust=True)
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
    urls: tuple[str, ...] = setting((), needs_trust=True)
    # With urls: environment variable that holds their key; null: none is sent.
    api_key_env: str | None = setting(None, needs_trust=True)
    judge: str | None = None  # With manager=judge: the entry of rewards.judges; null: the only one.


@dataclass(frozen=True, slots=True, kw_only=True)
class HybridConfig:
    """Define a mixture of reward managers: a row's reward is the sum of the parts routed to its data source."""

    parts: Mapping[str, HybridPartConfig] = field(default_factory=dict)  # Terms of the mixture by name.
    # Names of the terms that apply to a data source; sources that are not listed get all terms.
    routes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardsConfig:
    """Choose what computes rewards. A data source's scorer, if there is one, decides which responses are correct."""

    # Who gives rewards. rule: scorers and custom functions; remote: an HTTP service; model: a reward model on
    # Megatron; judge: a language model that writes verdicts; environment: the environments of conversations, whose
    # rewards of turns are added up; hybrid: a mixture of these.
    manager: Literal["rule", "remote", "model", "judge", "environment", "hybrid"] = "rule"
    sources: Mapping[str, SourceConfig] = field(default_factory=dict)  # Settings of the rule by data source.
    custom: CustomConfig = field(default_factory=CustomConfig)
    verifier: VerifierConfig = field(default_factory=VerifierConfig)
    ground_truths: GroundTruthConfig = field(default_factory=GroundTruthConfig)
    code: CodeConfig = field(default_factory=CodeConfig)
    remote: RemoteConfig = field(default_factory=RemoteConfig)
    judges: Mapping[str, JudgeConfig] = section(dict, needs_trust=True)  # Language models that judge in words, by name.
    # Models that the run serves for its judges, by a name that judges refer to.
    judge_servers: Mapping[str, JudgeServerConfig] = section(dict, affects=("workers",), needs_trust=True)
    hybrid: HybridConfig = field(default_factory=HybridConfig)
