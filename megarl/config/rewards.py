"""Define the section `rewards`, which chooses what computes the rewards of samples. See docs/rewards.md."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from megarl.config.judges import JudgeConfig, JudgeServerConfig, check_fallback
from megarl.config.mixture import HybridConfig, HybridPartConfig, RemoteConfig
from megarl.config.setting import ANY_NUMBER, AT_LEAST_1, BELOW_1, FRACTION, POSITIVE, PYTHON_FILE, section, setting
from megarl.errors import ConfigError
from megarl_sandbox.options import Limits


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

    path: str = setting(allowed=PYTHON_FILE)  # The Python file.
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
    path: str | None = setting(None, PYTHON_FILE, needs_trust=True)
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
    # Names of environment variables that the functions get besides the usual ones (docs/rewards.md).
    pass_env: tuple[str, ...] = setting((), needs_trust=True)
    workers: int = setting(2, AT_LEAST_1)  # Number of processes that the functions run in.
    timeout_s: float = setting(30.0, POSITIVE)  # Time after which a call is killed.
    memory_mib: int = setting(16384, AT_LEAST_1)  # Limit on the growth of the address space of a process.

    def check(self, key: str) -> None:
        """Raise ConfigError for two functions of one name, and for a `value` that `on_error` does not read."""
        if self.path is not None and self.name in self.functions:
            raise ConfigError(f"{key}.functions.{self.name}: {key}.path has a function of this name; rename this one")
        check_fallback(key, self.on_error, self.value)

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

    def check(self, key: str) -> None:
        """Raise ConfigError unless a scorer is interrupted before it is killed."""
        if self.hard_limit_s <= self.soft_limit_s:
            raise ConfigError(
                f"{key}.hard_limit_s: got {self.hard_limit_s}, expected more than {key}.soft_limit_s="
                f"{self.soft_limit_s}, which must have its chance first; raise it"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class GroundTruthConfig:
    """Configure how ground truths are checked at the start: each is judged as an answer to itself."""

    # Share of a data source's ground truths that may be empty or score as wrong; a larger one ends the run.
    max_unscorable: float = setting(0.0, FRACTION)
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
class RewardsConfig:
    """Choose what computes rewards. A data source's scorer, if there is one, decides which responses are correct."""

    # Who gives rewards. rule: scorers and custom functions; remote: an HTTP service; model: a reward model on
    # Megatron; judge: a language model that writes verdicts; environment: the environments of conversations, whose
    # rewards of turns are added up; hybrid: a mixture of these; none: nobody, so that all rewards are 0, for algorithms
    # that read none.
    manager: Literal["rule", "remote", "model", "judge", "environment", "hybrid", "none"] = "rule"
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

    @property
    def mixture(self) -> Mapping[str, HybridPartConfig]:
        """Return the parts of the hybrid mixture by name; none unless it is the manager."""
        return self.hybrid.parts if self.manager == "hybrid" else {}

    def uses(self, manager: str) -> bool:
        """Return whether the reward manager `manager` is used, alone or in the hybrid mixture."""
        return manager in (self.manager, *(part.manager for part in self.mixture.values()))

    def judge_key(self, part: str | None = None) -> str:
        """Return the entry of `judges` that `manager=judge`, or a part of the hybrid mixture, asks.

        Raises ConfigError if there is none, or more than one to choose from.
        """
        key, named, known = "rewards.manager=judge", None, ", ".join(self.judges) or "none"
        if part is not None:
            key, named = f"rewards.hybrid.parts.{part}", self.hybrid.parts[part].judge
        if named is not None and named not in self.judges:
            raise ConfigError(f"{key}.judge: got {named!r}, expected an entry of rewards.judges: {known}")
        if named is None and len(self.judges) != 1:
            remedy = (
                "name it in hybrid.parts.NAME.judge" if self.judges else "describe it there, see docs/rewards/judges.md"
            )
            raise ConfigError(f"{key}: asks the only entry of rewards.judges, but there is {known}; {remedy}")
        return named or next(iter(self.judges))

    def asked_judges(self) -> list[str]:
        """Return the entries of `judges` that are asked. Raises ConfigError as `judge_key` does."""
        parts = (
            [None] if self.manager == "judge" else [n for n, part in self.mixture.items() if part.manager == "judge"]
        )
        return [self.judge_key(part) for part in parts]

    def check(self, key: str) -> None:
        """Raise ConfigError for services, parts and judges that nothing asks, or that are asked and not there."""
        named = {source for function in self.custom.all_functions().values() for source in function.sources}
        takes_rest = any(not function.sources for function in self.custom.all_functions().values())
        for name, source in self.sources.items():
            if source.scorer is None and source != SourceConfig() and (takes_rest or name in named):
                raise ConfigError(
                    f"{key}.sources.{name}: says how a scorer judges this source, but {key}.custom judges it; set "
                    f"{key}.sources.{name}.scorer, or remove the other keys"
                )
        if self.manager != "hybrid" and self.hybrid != HybridConfig():
            raise ConfigError(
                f"{key}.hybrid: is set, but {key}.manager={self.manager} does not read it; set {key}.manager=hybrid, "
                "or remove it"
            )
        if self.manager == "hybrid" and not self.hybrid.parts:
            raise ConfigError(
                f"{key}.hybrid.parts: is empty, but {key}.manager=hybrid; name its parts, as in "
                "{rule: {manager: rule}, judge: {manager: remote, weight: 0.2}}"
            )
        self._check_services(key)
        self._check_judges(key)

    def _check_services(self, key: str) -> None:
        remote = (name for name, part in self.mixture.items() if part.manager == "remote" and not part.urls)
        asked = [key] if self.manager == "remote" else [f"{key}.hybrid.parts.{name}" for name in remote]
        if asked and not self.remote.urls:
            raise ConfigError(
                f"{key}.remote.urls: is empty, but {asked[0]}.manager=remote; list reward services, as in "
                "[http://host:8000/get_reward]"
            )
        if self.remote.urls and not asked:
            raise ConfigError(
                f"{key}.remote.urls: is set, but nothing asks these services; set {key}.manager=remote, or remove them"
            )

    def _check_judges(self, key: str) -> None:
        asked = self.asked_judges()
        for name, judge in self.judges.items():
            if name not in asked:
                raise ConfigError(
                    f"{key}.judges.{name}: nothing asks this judge; set {key}.manager=judge, or a part of the mixture"
                )
            if judge.server is not None and judge.server not in self.judge_servers:
                known = ", ".join(self.judge_servers) or "none"
                raise ConfigError(
                    f"{key}.judges.{name}.server: got {judge.server!r}, expected an entry of {key}.judge_servers: "
                    f"{known}"
                )
        used = {judge.server for judge in self.judges.values()}
        if unused := [name for name in self.judge_servers if name not in used]:
            raise ConfigError(
                f"{key}.judge_servers.{unused[0]}: no judge asks it; set {key}.judges.NAME.server={unused[0]}"
            )
