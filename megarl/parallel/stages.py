"""Exchange activations and their gradients between pipeline stages without telling each other their shapes first."""

from collections.abc import Sequence
from typing import TypeAlias

import torch.distributed as dist
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.pipeline_parallel.schedules import get_schedule_table
from megatron.core.transformer.transformer_config import TransformerConfig

Shape: TypeAlias = tuple[int, ...]


class KnownShapes(P2PCommunicator):
    """Megatron's exchange between stages, for micro-batches that differ in length but are known to every stage.

    Megatron would send a shape before each tensor, for which host and device wait. Here a stage looks up what arrives:
    in both directions, micro-batches keep the order of the schedule.

    shapes: of the hidden states that a stage passes on, by micro-batch. num_chunks: model chunks of a stage.
    """

    def __init__(
        self, pp_group: dist.ProcessGroup, config: TransformerConfig, shapes: Sequence[Shape], *, num_chunks: int
    ) -> None:
        super().__init__(pp_group, config)
        stage, last, together = pp_group.rank(), pp_group.size() - 1, config.microbatch_group_size_per_vp_stage
        # The order of backward is the same with chunks counted from the last.
        order = get_schedule_table(len(shapes), num_chunks, together if num_chunks > 1 else len(shapes))
        # At both ends of the pipeline, the first chunk of a pass gets nothing from another stage.
        self._from_previous = iter([shapes[i] for i, chunk in order if stage > 0 or chunk > 0])
        self._from_next = iter([shapes[i] for i, chunk in order if stage < last or chunk > 0])

    def _communicate_shapes(
        self, tensor_send_next: object, tensor_send_prev: object, recv_prev: bool, recv_next: bool
    ) -> tuple[Shape | None, Shape | None]:
        return next(self._from_previous) if recv_prev else None, next(self._from_next) if recv_next else None
