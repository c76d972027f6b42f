"""Forecast the seconds of a planned run's step from its settings and config.json alone."""

from megarl.cluster.roles import by_layout
from megarl.config.schema import Config
from megarl.forecast.costs import Constants, Hardware, StepCost, step_cost
from megarl.host.device.platform import assuming
from megarl.launch.submit import StopForecast
from megarl.plan.build import host_needs
from megarl.plan.derive import H100_BYTES
from megarl.plan.devices import plan_devices
from megarl.plan.memory import DTYPE_BYTES, checkpoint_bytes
from megarl.plan.run_plan import DevicePlan
from megarl.plan.sizes import SizedRun, role_plan, size_run

# A node writes so much to shared storage per second, a low estimate.
STORAGE_BYTES = 1e9


def planned_step(config: Config, *, device_bytes: int = H100_BYTES, constants: Constants | None = None) -> StepCost:
    """Forecast a step on GPUs with that much memory, whatever this machine is. Raises ConfigError as a run would."""
    with assuming("cuda"):
        return _cost(size_run(config, device_bytes), constants or Constants())


def planned_stop(config: Config) -> StopForecast:
    """Forecast how long a run takes to stop, and what it needs of a host. Raises ConfigError as a run would."""
    with assuming("cuda"):
        run, hardware = size_run(config, H100_BYTES), Hardware()
        cost, num_bytes = _cost(run, Constants()), 0.0
        host = host_needs(run.config, run.roles, run.shards, run.engine)
    for role in (role for role in run.roles if role.trainable):
        mine = [shard for shard in run.shards if shard.role == role.role]
        # Only adapters are written, if there are any.
        trained = sum(shard.num_trained_parameters for shard in mine) / sum(shard.num_parameters for shard in mine)
        count = role_plan(role, run.specs[role.role]).num_parameters * min(1.0, trained)
        num_bytes += checkpoint_bytes(int(count), DTYPE_BYTES[role.model.dtype], 1, shard=0, portable=False)
    num_nodes = -(-config.actor.layout.world_size // hardware.per_node)
    return StopForecast(
        step=cost.total,
        uncut=cost.train + cost.sync,
        checkpoint=num_bytes / num_nodes / STORAGE_BYTES,
        host=host,
    )


def _devices(run: SizedRun) -> list[DevicePlan]:
    return plan_devices(by_layout(run.roles), run.shards, run.engine, offload=run.config.placement.offload)


def _cost(run: SizedRun, constants: Constants) -> StepCost:
    return step_cost(
        run.config,
        run.actor.dims,
        run.shards,
        _devices(run),
        run.engine,
        num_forward_passes=len(run.needed),
        hardware=Hardware(),
        constants=constants,
    )
