"""Who judges samples, and how: the section `rewards`. See docs/rewards.md."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from megarl.config.setting import ANY_NUMBER, AT_LEAST_0, AT_LEAST_1, BELOW_1, POSITIVE, Range, section, setting
from megarl.sandbox.options import Limits


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceConfig:
    """How the rule judges one data source, by its name; what is left out is the scorer's own."""

    # Judge as another data source is; null: its own scorer, or the custom file if there is one.
    scorer: str | None = None
    correct: float | None = setting(None, ANY_NUMBER)  # Score of a right answer; null: the scorer's.
    wrong: float | None = setting(None, ANY_NUMBER)  # Score of a wrong answer; null: the scorer's.
    # Score where no answer could be read; null: the scorer's, mostly that of wrong.
    malformed: float | None = setting(None, ANY_NUMBER)
    # Formulas as the field's original code has them (ref), as its documents say (doc), or with their known exploits
    # closed (fix); null: the scorer's.
    mode: Literal["ref", "doc", "fix"] | None = None
    format: str | None = None  # A format by its name in docs/rewards/scorers.md that counts too; null: the scorer's.
    format_weight: float | None = setting(None, BELOW_1)  # Its share of the score; null: the scorer's, mostly 0.


@dataclass(frozen=True, slots=True, kw_only=True)
class CustomConfig:
    """A reward function of your own in a Python file. It judges every data source whose `scorer` is not set."""

    path: str | None = None  # The file; null: the built-in scorers judge.
    # The function in it: OpenRLHF's reward_func(queries, prompts, labels, **kwargs), or verl's
    # compute_score(data_source, solution_str, ground_truth, extra_info); told apart by their parameters.
    name: str = "reward_func"


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifierConfig:
    """The processes in which scorers and custom functions run."""

    workers: int = setting(2, AT_LEAST_1)  # Processes.
    # Of one answer, from when it begins to run; the scorer is interrupted.
    soft_limit_s: float = setting(2.0, POSITIVE)
    hard_limit_s: float = setting(5.0, POSITIVE)  # After which the process is killed and replaced.
    memory_mib: int = setting(2048, AT_LEAST_1)  # Of one process.


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeConfig:
    """How programs in responses are run against tests."""

    # Namespaces of the kernel keep programs in; where it grants none, nothing is run, unless limits_only says that
    # programs may read and write what this user can.
    isolation: Literal["namespaces", "limits_only"] = "namespaces"
    limits: Limits = section(Limits, POSITIVE)
    import_paths: tuple[str, ...] = ()  # Directories of packages that programs may import beside the standard library.
    # A program's share of passed tests, or 1 if it passes all and 0 otherwise.
    credit: Literal["fraction", "all_or_nothing"] = "all_or_nothing"
    # Relative and absolute, of numbers with a point; null: digits are compared.
    float_tolerance: float | None = setting(None, BELOW_1)
    max_tests: int | None = setting(None, AT_LEAST_1)  # Only the first of many; null: all.
    max_timeouts: int = setting(3, AT_LEAST_1)  # After so many tests that timed out the others count as timed out.
    workers: int = setting(2, AT_LEAST_1)  # Processes that run programs.
    deadline_s: float = setting(90.0, POSITIVE)  # Of all tests of one response.


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteConfig:
    """A reward service over HTTP, in OpenRLHF's format; `megarl serve-reward` is one."""

    urls: tuple[str, ...] = ()  # Of equal services: rows are dealt out over them.
    # Rows of one request. A request is sent as soon as so many samples have finished, and the rest at the end.
    rows_per_request: int = setting(16, AT_LEAST_1)
    timeout_s: float = setting(30.0, POSITIVE)  # Of one request, from connecting to the last byte.
    retries: int = setting(3, AT_LEAST_0)  # Further rounds over the services for a request that all of them failed.
    # Wait before the first of these rounds; it doubles each time, ± half of it at random.
    backoff_s: float = setting(0.5, AT_LEAST_0)
    # When no service answers: end the run, train without the rows, or give them `value`.
    on_error: Literal["raise", "drop_rows", "value"] = "drop_rows"
    value: float | None = setting(None, ANY_NUMBER)  # Only with on_error=value.


@dataclass(frozen=True, slots=True, kw_only=True)
class HybridPartConfig:
    """A summand of the mixture, by a name of your choice: weight × transform(reward)."""

    manager: Literal["rule", "remote", "model"]  # Who judges.
    weight: float = setting(1.0, Range(expected="not 0; leave the part out", never=0))  # Not 0.
    # Of the part's reward: 1 / (1 + e^−r); its z-score within the prompt's group, or within all rows that the part
    # judged in the batch; or clipped.
    transform: Literal["identity", "sigmoid", "group_zscore", "batch_zscore", "clip"] = "identity"
    clip: tuple[float, float] | None = None  # Low and high, only with transform=clip.
    urls: tuple[str, ...] = ()  # With manager=remote: services of its own; none: those of rewards.remote.


@dataclass(frozen=True, slots=True, kw_only=True)
class HybridConfig:
    """A mixture of managers: a row's reward is the sum over the parts of its data source."""

    parts: Mapping[str, HybridPartConfig] = field(default_factory=dict)  # By name.
    # Names of the parts of a data source; sources that are not listed get all parts.
    routes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardsConfig:
    """Who judges samples. Correctness is always the rule's where a data source has a scorer."""

    # Scorers and custom functions (rule), an HTTP service (remote), a reward model on Megatron (model), or a mixture.
    manager: Literal["rule", "remote", "model", "hybrid"] = "rule"
    sources: Mapping[str, SourceConfig] = field(default_factory=dict)  # By data source.
    custom: CustomConfig = field(default_factory=CustomConfig)
    verifier: VerifierConfig = field(default_factory=VerifierConfig)
    code: CodeConfig = field(default_factory=CodeConfig)
    remote: RemoteConfig = field(default_factory=RemoteConfig)
    hybrid: HybridConfig = field(default_factory=HybridConfig)
