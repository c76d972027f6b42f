"""Check that engines and trainer fit on their nodes, and that the weight-sync settings suit the placement."""

import contextlib
import importlib.metadata
from collections.abc import Mapping

from megarl.config.schema import Config, NodesConfig
from megarl.errors import ConfigError
from megarl.host.device.platform import platform

# The first NCCL with ncclCommSuspend.
_NCCL_THAT_SUSPENDS = (2, 29, 7)


def check_trainer_nodes(config: Config) -> None:
    """Raise ConfigError unless the actor's ranks fill the trainer's nodes."""
    size = config.actor.layout.world_size
    _require_full_nodes(config.placement.trainer, "placement.trainer", size, f"the {size} ranks of actor.layout")


def check_engines(config: Config) -> None:
    """Raise ConfigError unless engines fit on the trainer's devices or fill their own nodes; one that spans nodes has
    all of their devices.
    """
    engine, placement = config.rollout.engine, config.placement
    num_devices = engine.num_engines * engine.num_workers
    wanted = f"rollout.engine.num_engines={engine.num_engines} × rollout.engine.tp={engine.tp}"
    if engine.pp > 1:
        wanted += f" × rollout.engine.pp={engine.pp}"
    if placement.mode == "colocated":
        if placement.engines != NodesConfig():
            raise ConfigError(
                "placement.engines: is set, but with placement.mode=colocated engines run on the trainer's nodes; "
                "remove it or set placement.mode=split"
            )
        if num_devices > config.actor.layout.world_size:
            raise ConfigError(
                f"{wanted} = {num_devices} devices, but placement.mode=colocated shares the trainer's "
                f"{config.actor.layout.world_size}; lower one of them or set placement.mode=split"
            )
        nodes, where, count = placement.trainer, "placement.trainer", config.actor.layout.world_size
    else:
        if placement.offload:
            raise ConfigError(
                "placement.offload: got true with placement.mode=split, but then engines do not share the trainer's "
                "memory; set one of the two otherwise"
            )
        nodes, where, count = placement.engines, "placement.engines", num_devices
        _require_full_nodes(nodes, where, count, f"the {count} devices of {wanted}")
    per_node = nodes.devices_per_node or count // nodes.num_nodes
    if per_node % engine.num_workers and engine.num_workers % per_node:
        raise ConfigError(
            f"rollout.engine: an engine has tp={engine.tp} × pp={engine.pp} = {engine.num_workers} workers, expected a "
            f"divisor or a multiple of the {per_node} devices of each node of {where}, since an engine lies on one "
            f"node or fills several; change tp, pp or {where}"
        )
    _require_suspension(config)


def _require_suspension(config: Config) -> None:
    """Raise ConfigError for `placement.suspend_nccl` where nothing sleeps, or where NCCL cannot free its memory."""
    if not config.placement.suspend_nccl:
        return
    got = "placement.suspend_nccl: got true"
    if not config.placement.offload:
        raise ConfigError(f"{got} with placement.offload=false, where nobody sleeps; set one of the two otherwise")
    if platform().backend != "nccl":
        raise ConfigError(f"{got}, but on {platform().name} processes do not use NCCL; set it to false")
    for package in ("nvidia-nccl-cu12", "nvidia-nccl-cu13"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            version = importlib.metadata.version(package)
            if tuple(map(int, version.split(".")[:3])) < _NCCL_THAT_SUSPENDS:
                raise ConfigError(
                    f"{got}, but {package} is {version}, expected at least {'.'.join(map(str, _NCCL_THAT_SUSPENDS))}; "
                    "update it, or set it to false"
                )


def check_schedule(config: Config) -> None:
    """Raise ConfigError unless the schedule suits the placement, the correction and the wish for equal bits."""
    schedule = config.rollout.schedule
    ahead = f"rollout.schedule.staleness: got {schedule.staleness}"
    if schedule.staleness == 0:
        if schedule.window_frac:
            raise ConfigError(
                f"rollout.schedule.window_frac: got {schedule.window_frac} with rollout.schedule.staleness=0, where a "
                "step waits for all of its groups; set it to 0, or raise staleness"
            )
        return
    if config.placement.mode == "colocated":
        raise ConfigError(
            f"{ahead} with placement.mode=colocated, but engines that share the trainer's devices cannot generate "
            "while it works; set placement.mode=split, or staleness=0"
        )
    if config.algo.correction.name == "none" and not config.algo.correction.forced:
        raise ConfigError(
            f"{ahead} with algo.correction.name=none, but then ratios would be to weights that did not sample; set "
            "algo.correction.name, as use.schedule=one_step_off (rollout_ratio) and use.schedule=async (tis_upper) do, "
            "or algo.correction.forced=true to see what that costs"
        )
    if config.rollout.source != "vllm":
        return
    if schedule.on_update == "finish" and schedule.staleness > 1:
        raise ConfigError(
            f"{ahead} with rollout.schedule.on_update=finish, but engines are empty at every update, so more than 1 "
            "gains nothing; set staleness=1, or on_update=continue"
        )
    if schedule.on_update == "continue" and config.rollout.engine.pp > 1:
        raise ConfigError(
            f"rollout.engine.pp: got {config.rollout.engine.pp} with rollout.schedule.on_update=continue, but vLLM "
            "cannot take tokens back that are between two stages when new weights come; set on_update=finish or pp=1"
        )
    if schedule.on_update == "continue" and config.run.deterministic:
        raise ConfigError(
            "run.deterministic: got true with rollout.schedule.on_update=continue, where it depends on time which "
            "token new weights come at; set on_update=finish, or record the run and execute it again with "
            "rollout.source=regenerate"
        )


def check_sync(config: Config) -> None:
    """Raise ConfigError for weight-sync settings that exclude each other or that the placement does not allow."""
    sync = config.sync
    if sync.dtype == config.model.dtype:
        raise ConfigError(f"sync.dtype: got {sync.dtype}, which model.dtype already is; set sync.dtype=null")
    if sync.delta and sync.host_group == "device":
        raise ConfigError(
            "sync.delta: got true with sync.host_group=device, but differences are made in host memory; set "
            "sync.host_group=gloo or sync.delta=false"
        )
    if sync.cuda_ipc and config.placement.mode == "split":
        raise ConfigError(
            "sync.cuda_ipc: got true with placement.mode=split, but then no engine shares a device with a rank; set "
            "sync.cuda_ipc=false or placement.mode=colocated"
        )


def check_engine_tp(config: Config, hf_config: Mapping[str, object]) -> None:
    """Raise ConfigError unless rollout.engine.tp divides the model, and every one of rollout.engine.pp stages gets a
    layer; vLLM may replicate key-value heads to fit.
    """
    tp, pp = config.rollout.engine.tp, config.rollout.engine.pp
    if pp > 1 and pp > (num_layers := int(str(hf_config["num_hidden_layers"]))):
        raise ConfigError(
            f"rollout.engine.pp: got {pp}, but the model has num_hidden_layers={num_layers}, so that some stages would "
            "be empty; lower it"
        )
    sizes = {name: int(str(hf_config[name])) for name in ("num_attention_heads", "intermediate_size")}
    kv_heads = int(str(hf_config.get("num_key_value_heads") or sizes["num_attention_heads"]))
    valid = [
        n
        for n in range(1, sizes["num_attention_heads"] + 1)
        if all(size % n == 0 for size in sizes.values()) and (kv_heads % n == 0 or n % kv_heads == 0)
    ]
    if tp not in valid:
        named = ", ".join(f"{name}={size}" for name, size in (sizes | {"num_key_value_heads": kv_heads}).items())
        raise ConfigError(
            f"rollout.engine.tp: got {tp}, which does not divide the model ({named}); "
            f"valid values: {', '.join(map(str, valid))}"
        )


def _require_full_nodes(nodes: NodesConfig, where: str, count: int, what: str) -> None:
    if count % nodes.num_nodes:
        raise ConfigError(
            f"{where}.num_nodes: got {nodes.num_nodes}, expected a divisor of {count}, {what}; change either"
        )
    if nodes.devices_per_node not in (None, count // nodes.num_nodes):
        raise ConfigError(
            f"{where}: num_nodes={nodes.num_nodes} × devices_per_node={nodes.devices_per_node} is not {what}; "
            f"change either"
        )
