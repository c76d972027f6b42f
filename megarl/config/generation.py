"""Define the sections for rollouts, placement, weight syncs and validation."""

import contextlib
import importlib.metadata
from dataclasses import dataclass, field, replace
from math import ceil
from typing import Literal

from megarl.config.engine import EngineConfig
from megarl.config.setting import AT_LEAST_0, AT_LEAST_1, FRACTION, POSITIVE, SHARE, Range, section, setting
from megarl.errors import ConfigError
from megarl.host.device.platform import Platform, platform

# The first NCCL with ncclCommSuspend.
_NCCL_THAT_SUSPENDS = (2, 29, 7)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleConfig:
    """Configure how far generation may run ahead of training."""

    # Weight updates that may come between the admission of a prompt and the start of the step that trains on its
    # samples; 0: synchronous, engines wait while the trainer works.
    staleness: int = setting(0, AT_LEAST_0)
    # finish: before new weights come, engines finish all samples; continue: unfinished samples go on with the new
    # weights, and each token knows the version that sampled it.
    on_update: Literal["finish", "continue"] = "finish"
    # Share of the (staleness + 1) · trainer.prompts_per_step prompts under way within which a finished group may train
    # before an older one. 0: strict order.
    window_frac: float = setting(0.0, FRACTION)
    # by_load: an engine has about as many requests as it can decode at a time, the next one goes to the engine with the
    # most free KV cache, and idle engines take over samples of others; in_turns: all requests go out at once, prompts
    # in turn, and stay. null: in_turns with run.deterministic or rollout.source=regenerate, or with one engine; else
    # by_load.
    routing: Literal["by_load", "in_turns"] | None = None

    def check(self, key: str) -> None:
        """Raise ConfigError for a window in which nothing can move."""
        if self.staleness == 0 and self.window_frac:
            raise ConfigError(
                f"{key}.window_frac: got {self.window_frac} with {key}.staleness=0, where a step waits for all of its "
                "groups; set it to 0, or raise staleness"
            )

    def window(self, prompts_per_step: int) -> int:
        """Return `window_frac` in prompts; 1: strict order."""
        return max(1, int(self.window_frac * (self.staleness + 1) * prompts_per_step))

    def max_lag(self, prompts_per_step: int) -> int:
        """Return the bound on the lag of any token."""
        return max_lag(self.staleness, self.window(prompts_per_step), prompts_per_step)


def max_lag(staleness: int, window: int, prompts_per_step: int) -> int:
    """Return the bound on the lag of any token, η + ⌈(W − 1)/P⌉, which `megarl.rollout.scheduler` proves."""
    return staleness + ceil((window - 1) / prompts_per_step)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How the tokens of a response are sampled; `temperature` 0 means greedy.

    stop, stop_token_ids: texts and tokens that end a response, which includes them.
    """

    temperature: float
    top_p: float = 1.0
    top_k: int = -1
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()

    def greedy(self) -> "Sampling":
        """Return the greedy choice of tokens with the same ends."""
        return replace(self, temperature=0.0, top_p=1.0, top_k=-1)


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutConfig:
    """Configure how responses are sampled."""

    # vllm: generate with vLLM; replay: use the samples that an earlier run recorded; regenerate: use them, and check
    # that the engines sample each of them again with equal tokens and log-probs.
    source: Literal["vllm", "replay", "regenerate"] = "vllm"
    num_samples: int = setting(8, AT_LEAST_1)  # Samples per prompt: the group size.
    # Sampling temperature; all log-probs in training use it too.
    temperature: float = setting(1.0, POSITIVE, affects=("engines",))
    # Nucleus sampling threshold; below 1, training needs a limit by top_k too. Log-probs in training are those of the
    # distribution over the tokens that top_k and top_p left to sample from.
    top_p: float = setting(1.0, SHARE, affects=("engines",))
    # Number of most likely tokens to sample from; in training, at least 2.
    top_k: int = setting(-1, Range(expected=">= 1, or -1 for no limit", at_least=1, also=-1), affects=("engines",))
    # Number of most likely tokens whose log-probs are recorded with each sampled token, for losses that compare the
    # distributions of engine and trainer (algo.policy_loss.name=score_centering), 8 bytes each; 0: none. With top_k, it
    # must be equal to it.
    head_tokens: int = setting(0, AT_LEAST_0, affects=("engines",))
    max_response_tokens: int = setting(1024, AT_LEAST_1)  # Maximum response length; longer responses are truncated.
    stop: tuple[str, ...] = ()  # Texts that end a response, such as </answer>; the response ends with the text.
    # Tokens that end a response, besides those by which the model ends an answer (docs/data.md).
    stop_token_ids: tuple[int, ...] = setting((), AT_LEAST_0)
    # Time limit of one call to the trainer's ranks, and of a wait for any engine to finish a sample.
    timeout_s: float = setting(3600.0, POSITIVE, affects=("workers",))
    # Number of engine crashes that a run survives: each time the unfinished samples are generated again, and the engine
    # is restarted.
    max_engine_restarts: int = setting(3, AT_LEAST_0)
    record: bool = False  # Record every step's rollout under RUN/records, for replay.
    replay_dir: str | None = None  # RUN/records of the run to replay or to regenerate.
    engine: EngineConfig = section(EngineConfig, affects=("engines", "workers"))
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)

    def check(self, key: str) -> None:
        """Raise ConfigError for samples that cannot be trained on, or that nobody could give."""
        if self.top_k != -1 and self.head_tokens not in (0, self.top_k):
            raise ConfigError(
                f"{key}.head_tokens: got {self.head_tokens} with {key}.top_k={self.top_k}, but all tokens are recorded "
                f"that it leaves to sample; set {key}.head_tokens={self.top_k}"
            )
        if self.top_p != 1 and self.top_k == -1:
            raise ConfigError(
                f"{key}.top_p: got {self.top_p}, but {key}.top_k=-1 does not limit the number of tokens that it leaves "
                f"to sample from, which training records for every token; set {key}.top_k, as in {key}.top_k=100, or "
                f"{key}.top_p=1.0"
            )
        if self.top_k == 1:
            raise ConfigError(
                f"{key}.top_k: got 1, which leaves nothing to choose, so no token has a gradient; set it to at least "
                "2, or to -1"
            )
        if self.source != "vllm" and not self.replay_dir:
            raise ConfigError(
                f"{key}.replay_dir: is not set, but {key}.source={self.source}; set it to the records directory of an "
                f"earlier run with {key}.record=true"
            )
        continues = self.schedule.staleness and self.schedule.on_update == "continue" and self.source == "vllm"
        if continues and self.engine.pp > 1:
            raise ConfigError(
                f"{key}.engine.pp: got {self.engine.pp} with {key}.schedule.on_update=continue, but vLLM cannot take "
                "tokens back that are between two stages when new weights come; set on_update=finish or pp=1"
            )

    def sampling(self, stop_token_ids: tuple[int, ...]) -> Sampling:
        """Return how responses are sampled, which these tokens end."""
        return Sampling(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            stop=self.stop,
            stop_token_ids=stop_token_ids,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class NodesConfig:
    """Set the number of nodes over which a group of processes is distributed evenly."""

    num_nodes: int = setting(1, AT_LEAST_1)  # Number of nodes.
    # Devices used on each node; null: as many as the processes need.
    devices_per_node: int | None = setting(None, AT_LEAST_1)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementConfig:
    """Choose whether engines share the trainer's devices (colocated) or have their own (split)."""

    # colocated: engines run on the trainer's devices; split: they have devices of their own.
    mode: Literal["colocated", "split"] = "colocated"
    trainer: NodesConfig = field(default_factory=NodesConfig)
    # Nodes of the engines; only with mode=split.
    engines: NodesConfig = field(default_factory=NodesConfig)
    # With mode=colocated: move the trainer's state to host memory while engines generate, and put engines to
    # sleep while the trainer works.
    offload: bool = False
    # With offload, on CUDA: also free the buffers of NCCL's communicators, of the trainer while all of its state is in
    # host memory and of engines while they sleep. Requires NCCL 2.29.7.
    suspend_nccl: bool = False
    # On CUDA, where a host has several NUMA nodes: bind each rank and engine to the CPUs next to its devices, and, if
    # libnuma is installed, prefer the memory there.
    bind_numa: bool = True

    def check(self, key: str) -> None:
        """Raise ConfigError for settings that the mode does not read, and for memory that cannot be freed."""
        if self.mode == "colocated" and self.engines != NodesConfig():
            raise ConfigError(
                f"{key}.engines: is set, but with {key}.mode=colocated engines run on the trainer's nodes; remove it "
                f"or set {key}.mode=split"
            )
        if self.mode == "split" and self.offload:
            raise ConfigError(
                f"{key}.offload: got true with {key}.mode=split, but then engines do not share the trainer's memory; "
                "set one of the two otherwise"
            )
        if not self.suspend_nccl:
            return
        got = f"{key}.suspend_nccl: got true"
        if not self.offload:
            raise ConfigError(f"{got} with {key}.offload=false, where nobody sleeps; set one of the two otherwise")
        if platform().backend != "nccl":
            raise ConfigError(f"{got}, but on {platform().name} processes do not use NCCL; set it to false")
        for package in ("nvidia-nccl-cu12", "nvidia-nccl-cu13"):
            with contextlib.suppress(importlib.metadata.PackageNotFoundError):
                version = importlib.metadata.version(package)
                if tuple(map(int, version.split(".")[:3])) < _NCCL_THAT_SUSPENDS:
                    raise ConfigError(
                        f"{got}, but {package} is {version}, expected at least "
                        f"{'.'.join(map(str, _NCCL_THAT_SUSPENDS))}; update it, or set it to false"
                    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncConfig:
    """Configure how the policy's weights are sent from the trainer to the engines after every update."""

    verify: bool = False  # Compare checksums of every tensor on both sides after each sync; slow, for debugging.
    # Syncs between two of which the canary asks every engine whether it computes as the trainer does (docs/trust.md);
    # null: as many as keep that below 1 % of the run's time; 0: never.
    canary_every: int | None = setting(None, AT_LEAST_0)
    # Connection between hosts. gloo: TCP, from host memory; device: the devices' own links (NCCL), with
    # placement.mode=colocated between the trainer's ranks, which pass on what their engines lack; null: device on CUDA,
    # but gloo with delta. Within a host, gloo means shared memory, and so does device unless the devices' own links are
    # faster.
    host_group: Literal["gloo", "device"] | None = setting(None, affects=("workers",))
    # Data type to which weights are cast for the transfer; null: no cast. float8_e4m3 has one
    # scale per matrix and is expanded to float32 before vLLM loads it, so engines sample from less precise
    # weights than the trainer's.
    dtype: Literal["bfloat16", "float8_e4m3"] | None = setting(None, affects=("workers",))
    # Send only the elements that changed, without loss. This takes host memory for a copy of the
    # transferred weights on each side, and time to compare and verify.
    delta: bool = setting(False, affects=("workers",))
    # With delta: every this many syncs, send all elements.
    delta_full_every: int = setting(50, AT_LEAST_1, affects=("workers",))
    # Ranks and engine workers on the same device exchange weights in device memory instead of host memory; null:
    # on CUDA. This takes up to two messages of 64 MiB of device memory per pair.
    cuda_ipc: bool | None = setting(None, affects=("workers",))

    def check(self, key: str) -> None:
        """Raise ConfigError for differences that would be made where they cannot be."""
        if self.delta and self.host_group == "device":
            raise ConfigError(
                f"{key}.delta: got true with {key}.host_group=device, but differences are made in host memory; set "
                f"{key}.host_group=gloo or {key}.delta=false"
            )

    def group_between_hosts(self, here: Platform) -> Literal["gloo", "device"]:
        """Return `host_group`, or what null means on a platform: differences are made in host memory."""
        return self.host_group or ("device" if here.backend == "nccl" and not self.delta else "gloo")


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidationConfig:
    """Configure validation on data.val: `num_samples` sampled answers to each prompt, and a greedy one if `greedy`."""

    before_train: bool = True  # Also validate the initial policy.
    # Steps between validations; the last step is always validated.
    every_steps: int = setting(10, Range(expected=">= 1 (data.val=[] skips validation)", at_least=1))
    num_samples: int = setting(1, AT_LEAST_1)  # Sampled answers per prompt.
    pass_at: tuple[int, ...] = setting((), AT_LEAST_1)  # Report pass@k for these k, at most num_samples.
    # Temperature of the sampled answers.
    temperature: float = setting(1.0, Range(expected="> 0 (validation.greedy=true is argmax)", above=0))
    top_p: float = setting(1.0, SHARE)  # Nucleus sampling threshold of the sampled answers.
    # Number of most likely tokens to sample from.
    top_k: int = setting(-1, Range(expected=">= 1, or -1 for no limit", at_least=1, also=-1))
    max_response_tokens: int | None = setting(None, AT_LEAST_1)  # Maximum length; null: rollout.max_response_tokens.
    greedy: bool = True  # Also score one greedy answer per prompt.
    # Use only the first prompts of data.val, at most this many; null: all.
    max_prompts: int | None = setting(None, AT_LEAST_1)
    # End the run after so many validations in a row whose score (checkpoint.best_metric) is 0, if one before was
    # better: such a policy has collapsed, and rewards that are all alike teach it nothing; null: never.
    stop_after_zeros: int | None = setting(None, AT_LEAST_1)

    def check(self, key: str) -> None:
        """Raise ConfigError for a pass@k of more answers than there are."""
        if any(k > self.num_samples for k in self.pass_at):
            raise ConfigError(
                f"{key}.pass_at: got {list(self.pass_at)}, expected at most {key}.num_samples={self.num_samples}; "
                "raise that, or lower these"
            )
