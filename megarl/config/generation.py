"""How engines generate, where they run, and how they get the trainer's weights."""

from dataclasses import dataclass, field
from typing import Literal

from megarl.config.setting import AT_LEAST_0, AT_LEAST_1, POSITIVE, SHARE, Range, section, setting


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """The vLLM engines, alike. Nulls leave the choice to vLLM."""

    num_engines: int = setting(1, AT_LEAST_1)  # Each holds a full copy of the policy.
    # Tensor-parallel size of each engine.
    tp: int = setting(1, AT_LEAST_1)
    max_num_seqs: int = setting(256, AT_LEAST_1)  # Sequences decoded at a time.
    max_model_tokens: int | None = setting(None, AT_LEAST_1)  # Context length; null: the longest row.
    kv_cache_mib: int | None = setting(None, AT_LEAST_1)  # Per device.
    gpu_memory_utilization: float = setting(0.6, SHARE)  # Share of a device's memory that an engine takes.
    block_size: int | None = setting(None, AT_LEAST_1)  # Tokens per block of the KV cache.
    enforce_eager: bool = False  # No CUDA graphs.
    prefix_caching: bool = True  # Share the KV cache of equal prompts.


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutConfig:
    """How samples are drawn. `replay` reads rollouts that an earlier run recorded."""

    source: Literal["vllm", "replay"] = "vllm"  # vLLM, or a recorded run's samples.
    num_samples: int = setting(8, AT_LEAST_1)  # Samples per prompt: a group.
    temperature: float = setting(1.0, POSITIVE)  # Of sampling, and of all log-probs in training.
    top_p: float = setting(1.0, SHARE)  # Anything but 1 is refused in training.
    # Anything but -1 is refused in training.
    top_k: int = setting(-1, Range(expected=">= 1, or -1 for no limit", at_least=1, also=-1))
    max_response_tokens: int = setting(1024, AT_LEAST_1)  # Longer responses are cut.
    timeout_s: float = setting(
        3600.0, POSITIVE, affects=("workers",)
    )  # For one step's generation, and for one call of the trainer's ranks.
    # So many engines that die in a run are restarted; what they had not finished is generated again.
    max_engine_restarts: int = setting(3, AT_LEAST_0)
    # Keep every step's rollout under RUN/records, for replay.
    record: bool = False
    replay_dir: str | None = None  # RUN/records of the recorded run.
    engine: EngineConfig = section(EngineConfig, affects=("engines", "workers"))


@dataclass(frozen=True, slots=True, kw_only=True)
class NodesConfig:
    """The nodes that a group of processes fills evenly; null: as many devices of each as it needs."""

    num_nodes: int = setting(1, AT_LEAST_1)  # Nodes.
    devices_per_node: int | None = setting(None, AT_LEAST_1)  # Devices of each node.


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementConfig:
    """Whether engines share the trainer's devices (colocated) or have their own (split)."""

    mode: Literal["colocated", "split"] = "colocated"  # Where engines run.
    trainer: NodesConfig = field(default_factory=NodesConfig)
    # Only with mode=split.
    engines: NodesConfig = field(default_factory=NodesConfig)
    # Colocated: the trainer's memory moves to the host while engines generate, and they sleep while it works.
    offload: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncConfig:
    """Weight sync from trainer to engine. `verify` compares a checksum of every tensor on both sides."""

    verify: bool = False  # Slow; for tests and suspicions.
    # Through a file in the hosts' shared memory; or (split placement only) over a process group of the trainer's ranks
    # and the engines' workers: NCCL on CUDA, gloo on CPU; or by a bridge, which sends every worker only the slices that
    # it needs and shares no memory with: through shared memory within a host, by host_group between hosts.
    transport: Literal["file", "collective", "bridge"] = setting("file", affects=("workers",))
    # What connects several hosts: the network (by gloo; with the bridge by TCP connections of its own, to ports that
    # engines' hosts choose), or the devices' own connections (NCCL).
    host_group: Literal["gloo", "device"] = setting("gloo", affects=("workers",))
    # With the bridge: what weights are cast to on their way; null: nothing. float8_e4m3 has a scale per matrix, and
    # reaches vLLM as float32 again. The engine then answers with less precise weights than the trainer has.
    dtype: Literal["bfloat16", "float8_e4m3"] | None = setting(None, affects=("workers",))
    # With the bridge: send only elements that changed, which is exact. Costs a copy of what travels in host memory on
    # each side, and time to compare and check.
    delta: bool = setting(False, affects=("workers",))
    delta_full_every: int = setting(
        50, AT_LEAST_1, affects=("workers",)
    )  # With delta, each so many syncs send everything.
    # With the bridge on CUDA: ranks and engine workers on one device exchange what they share there, not through the
    # host's memory. Costs up to two messages of 128 MiB of device memory per pair.
    cuda_ipc: bool = setting(False, affects=("workers",))


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidationConfig:
    """Validation on data.val: sampled at `temperature` with `num_samples`, and greedily."""

    before_train: bool = True  # Also validate the policy that the run starts from.
    # And after the last step.
    every_steps: int = setting(10, Range(expected=">= 1 (data.val=[] skips validation)", at_least=1))
    num_samples: int = setting(1, AT_LEAST_1)  # Sampled answers per prompt.
    # Of the sampled answers.
    temperature: float = setting(1.0, Range(expected="> 0 (validation.greedy=true is argmax)", above=0))
    greedy: bool = True  # Also score one greedy answer per prompt.
    max_prompts: int | None = setting(None, AT_LEAST_1)  # The first ones of data.val; null: all.
