"""Check what engines and trainer must agree on: devices and nodes, the schedule, weight syncs, and what engines say."""

from megarl.config.schema import Config, NodesConfig
from megarl.errors import ConfigError
from megarl.host.device.platform import ALLOCATOR_VARIABLES, allocator_settings, platform
from megarl.host.memory import host_memory


def check_trainer_nodes(config: Config) -> None:
    """Raise ConfigError unless the actor's ranks fill the trainer's nodes."""
    size = config.actor.layout.world_size
    _require_full_nodes(config.placement.trainer, "placement.trainer", size, f"the {size} ranks of actor.layout")


def check_cache(config: Config) -> None:
    """Raise ConfigError for caches of engines that this host cannot hold; `plan_engine` checks those on devices."""
    engine = config.rollout.engine
    needed = (engine.kv_cache_mib or 0) * engine.num_engines * engine.num_workers
    total = host_memory() >> 20
    if config.cluster.address is None and platform().name == "cpu" and needed > total:
        raise ConfigError(
            f"rollout.engine.kv_cache_mib: got {engine.kv_cache_mib}, for all engines {needed:,} MiB, but this host "
            f"has {total:,} MiB of memory for this process; lower it, or plan for other devices with --device-gib"
        )


def check_engines(config: Config) -> None:
    """Raise ConfigError unless the engines have the devices that they need.

    Colocated engines may take at most the trainer's devices; others must fill the nodes of `placement.engines`. An
    engine that spans several nodes must take all devices of these nodes.
    """
    engine, placement = config.rollout.engine, config.placement
    num_devices = engine.num_engines * engine.num_workers
    wanted = f"rollout.engine.num_engines={engine.num_engines} × rollout.engine.tp={engine.tp}"
    if engine.pp > 1:
        wanted += f" × rollout.engine.pp={engine.pp}"
    if placement.mode == "colocated":
        if num_devices > config.actor.layout.world_size:
            raise ConfigError(
                f"{wanted} = {num_devices} devices, but placement.mode=colocated shares the trainer's "
                f"{config.actor.layout.world_size}; lower one of them or set placement.mode=split"
            )
        nodes, where, count = placement.trainer, "placement.trainer", config.actor.layout.world_size
    else:
        nodes, where, count = placement.engines, "placement.engines", num_devices
        _require_full_nodes(nodes, where, count, f"the {count} devices of {wanted}")
    per_node = nodes.devices_per_node or count // nodes.num_nodes
    if per_node % engine.num_workers and engine.num_workers % per_node:
        raise ConfigError(
            f"rollout.engine: an engine has tp={engine.tp} × pp={engine.pp} = {engine.num_workers} workers, expected a "
            f"divisor or a multiple of the {per_node} devices of each node of {where}, since an engine lies on one "
            f"node or fills several; change tp, pp or {where}"
        )


def check_schedule(config: Config) -> None:
    """Raise ConfigError unless the schedule is compatible with placement, correction and `run.deterministic`."""
    schedule, source = config.rollout.schedule, config.rollout.source
    if schedule.routing == "by_load" and (config.run.deterministic or source == "regenerate"):
        cause = "run.deterministic=true" if config.run.deterministic else f"rollout.source={source}"
        raise ConfigError(
            f"rollout.schedule.routing: got by_load with {cause}, but then it depends on time where a sample goes on; "
            "set rollout.schedule.routing to null or in_turns"
        )
    if schedule.staleness == 0:
        return
    ahead = f"rollout.schedule.staleness: got {schedule.staleness}"
    if config.placement.mode == "colocated" and source == "vllm":
        shared = "with placement.mode=colocated"
        if schedule.on_update == "finish":
            raise ConfigError(
                f"{ahead} {shared} and rollout.schedule.on_update=finish, but engines that share the trainer's devices "
                "cannot generate while it works; set on_update=continue, placement.mode=split or staleness=0"
            )
        if config.rollout.stop:
            raise ConfigError(
                f"{ahead} {shared} and rollout.stop={list(config.rollout.stop)}, but samples are interrupted in each "
                "step, and a text that begins before and ends after is not found; use rollout.stop_token_ids, "
                "placement.mode=split or staleness=0"
            )
    # These are only read by losses that correct for staleness themselves.
    is_read = config.rollout.head_tokens or config.algo.policy_loss.kept_versions
    if config.algo.correction.name == "none" and not (config.algo.correction.forced or is_read):
        raise ConfigError(
            f"{ahead} with algo.correction.name=none, but then ratios would be to weights that did not sample; set "
            "algo.correction.name, as use.schedule=one_step_off (rollout_ratio) and use.schedule=async (tis_upper) do, "
            "or algo.correction.forced=true to see what that costs"
        )
    if source != "vllm":
        return
    if schedule.on_update == "finish" and schedule.staleness > 1:
        raise ConfigError(
            f"{ahead} with rollout.schedule.on_update=finish, but engines are empty at every update, so more than 1 "
            "gains nothing; set staleness=1, or on_update=continue"
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
    if sync.cuda_ipc and config.placement.mode == "split":
        raise ConfigError(
            "sync.cuda_ipc: got true with placement.mode=split, but then no engine shares a device with a rank; set "
            "sync.cuda_ipc=false or placement.mode=colocated"
        )
    if sync.cuda_ipc and not platform().has_ipc:
        raise ConfigError(
            f"sync.cuda_ipc: got true, but processes cannot share a device's memory on {platform().name}; set "
            f"sync.cuda_ipc=false"
        )
    shares = platform().has_ipc and sync.cuda_ipc is not False and config.placement.mode == "colocated"
    if shares and "cudaMallocAsync" in (settings := allocator_settings()):
        raise ConfigError(
            f"{' or '.join(ALLOCATOR_VARIABLES)}: got {settings!r}, but processes cannot share memory of "
            "cudaMallocAsync, by which weights reach engines on the trainer's devices; leave the backend out, or set "
            "sync.cuda_ipc=false"
        )


def check_quantization(config: Config) -> None:
    """Raise ConfigError for engines that compute in less precision than the trainer, unless something corrects that."""
    engine, sync = config.rollout.engine, config.sync
    for name, value in (("quantization", engine.quantization), ("kv_cache_dtype", engine.kv_cache_dtype)):
        if value is not None and config.algo.correction.name == "none" and config.rollout.source == "vllm":
            raise ConfigError(
                f"rollout.engine.{name}: got {value} with algo.correction.name=none, but then nothing corrects for "
                "samples of a less precise policy; set algo.correction.name, as in algo.correction.name=tis_upper"
            )
    if engine.quantization is not None and sync.dtype == "float8_e4m3":
        raise ConfigError(
            f"sync.dtype: got float8_e4m3 with rollout.engine.quantization={engine.quantization}, so that weights "
            "would be rounded twice, to different scales; set sync.dtype=null or rollout.engine.quantization=null"
        )


def check_replayed_routing(config: Config) -> None:
    """Raise ConfigError for `actor.moe.replay_routing` where nothing says of all tokens to which experts they went."""
    rollout = config.rollout
    if not config.actor.moe.replay_routing or rollout.source == "replay":
        return
    where = f"actor.moe.replay_routing: got true with rollout.source={rollout.source}"
    if rollout.source != "vllm" or platform().name != "cuda":
        raise ConfigError(
            f"{where}, but only a record, or vLLM on CUDA, can say to which experts its tokens went; set "
            "rollout.source=replay, or actor.moe.replay_routing=false"
        )
    hindrances = {
        "rollout.engine.prefix_caching=false": not rollout.engine.prefix_caching,
        "run.deterministic=true": config.run.deterministic,
        "rollout.engine.pp > 1": rollout.engine.pp > 1,
    }
    if found := [name for name, is_set in hindrances.items() if is_set]:
        raise ConfigError(
            f"{where} and {found[0]}, with which vLLM does not record to which experts tokens went; change either"
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
