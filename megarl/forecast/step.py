"""Forecast the seconds of a planned run's step from its settings and config.json alone."""

from megarl.cluster.roles import by_layout
from megarl.config.schema import Config
from megarl.forecast.costs import Constants, Hardware, StepCost, step_cost
from megarl.host.device.platform import assuming
from megarl.plan.devices import plan_devices
from megarl.plan.sizes import size_run
from megarl.types.messages import Role

# Memory of the GPU that is assumed where none is named: an H100.
DEVICE_BYTES = 80 << 30


def planned_step(config: Config, *, device_bytes: int = DEVICE_BYTES, constants: Constants | None = None) -> StepCost:
    """Forecast a step on GPUs with so much memory, whatever this machine is. Raises ConfigError as a run would."""
    with assuming("cuda"):
        run = size_run(config, device_bytes)
        devices = plan_devices(run.config, by_layout(run.roles), run.shards, run.engine)
        return step_cost(
            run.config,
            run.specs[Role.ACTOR].dims,
            run.shards,
            devices,
            run.engine,
            num_forward_passes=len(run.needed),
            hardware=Hardware(),
            constants=constants or Constants(),
        )
