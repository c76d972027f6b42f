"""Set up Megatron's process groups in a worker process. No other module of megarl reads Megatron's global state."""

import datetime
from dataclasses import dataclass

import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection

from megarl.config.schema import LayoutConfig
from megarl.host.device.gloo import close_gloo
from megarl.host.device.platform import platform


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """This rank's process groups (tensor, context, pipeline, data, expert parallel) under a `LayoutConfig`."""

    config: LayoutConfig
    rank: int
    tp_group: dist.ProcessGroup
    cp_group: dist.ProcessGroup
    pp_group: dist.ProcessGroup
    dp_group: dist.ProcessGroup
    # Ranks that hold the same parameter shards: data and context parallel.
    replica_group: dist.ProcessGroup
    # The groups of experts, which are split over a stage's ranks in a way of their own.
    ep_group: dist.ProcessGroup
    etp_group: dist.ProcessGroup
    expert_replica_group: dist.ProcessGroup
    # The groups that Megatron's pipeline schedules ask for.
    schedule_groups: ProcessGroupCollection

    @property
    def is_last_stage(self) -> bool:
        return self.pp_group.rank() == self.config.pp - 1

    @property
    def reports(self) -> bool:
        """Return whether this rank reports its data-parallel replica's results: tp and cp rank 0, last stage."""
        return self.tp_group.rank() == 0 and self.cp_group.rank() == 0 and self.is_last_stage


def initialize_layout(config: LayoutConfig, *, rank: int, store: dist.Store, timeout_s: float) -> Layout:
    """Join torch's default process group, create Megatron's groups in it, and return this rank's `Layout`.

    store: where the ranks find each other.
    """
    close_gloo()
    dist.init_process_group(
        platform().backend,
        store=store,
        rank=rank,
        world_size=config.world_size,
        timeout=datetime.timedelta(seconds=timeout_s),
    )
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=config.tp,
        pipeline_model_parallel_size=config.pp,
        virtual_pipeline_model_parallel_size=config.virtual_pp if config.virtual_pp > 1 else None,
        context_parallel_size=config.cp,
        expert_model_parallel_size=config.ep,
        expert_tensor_parallel_size=config.etp,
        distributed_timeout_minutes=timeout_s / 60,
    )
    return Layout(
        config=config,
        rank=rank,
        tp_group=parallel_state.get_tensor_model_parallel_group(),
        cp_group=parallel_state.get_context_parallel_group(),
        pp_group=parallel_state.get_pipeline_model_parallel_group(),
        dp_group=parallel_state.get_data_parallel_group(),
        replica_group=parallel_state.get_data_parallel_group(with_context_parallel=True),
        ep_group=parallel_state.get_expert_model_parallel_group(),
        etp_group=parallel_state.get_expert_tensor_parallel_group(),
        expert_replica_group=parallel_state.get_expert_data_parallel_group(),
        schedule_groups=ProcessGroupCollection.use_mpu_process_groups(["tp", "cp", "pp", "dp_cp", "embd", "pos_embd"]),
    )


def destroy_layout() -> None:
    """Destroy the groups of `initialize_layout`; dropping the last reference would not end their threads."""
    parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()
