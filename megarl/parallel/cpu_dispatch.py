"""Tokens to experts and back on a CPU: what Megatron's dispatcher does with CUDA tensors and with NCCL only."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist


def install() -> None:
    """Replace Megatron's functions by ones that run on a CPU; part of `cpu_shim.install`."""
    import megatron.core.tensor_parallel.mappings as mappings
    import megatron.core.transformer.moe.token_dispatcher as dispatcher

    gather, reduce_scatter = mappings._gather_along_first_dim, mappings._reduce_scatter_along_first_dim

    def gather_first(input_: Any, group: Any, output_split_sizes: Any = None, use_global_buffer: bool = False) -> Any:
        if output_split_sizes is None or group.size() == 1:
            return gather(input_, group, output_split_sizes, use_global_buffer)
        return gather_uneven(input_, group, output_split_sizes)

    def reduce_scatter_first(
        input_: Any, group: Any, input_split_sizes: Any = None, use_global_buffer: bool = False
    ) -> Any:
        if input_split_sizes is None or group.size() == 1:
            return reduce_scatter(input_, group, input_split_sizes, use_global_buffer)
        return reduce_scatter_uneven(input_, group, input_split_sizes)

    dispatcher.maybe_move_tensor_to_cpu = _on_host
    mappings._gather_along_first_dim = gather_first
    mappings._reduce_scatter_along_first_dim = reduce_scatter_first


def _on_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    # Megatron turns only tensors of a CUDA device into arrays, but counts on arrays.
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


def gather_uneven(own: torch.Tensor, group: dist.ProcessGroup, sizes: Sequence[int]) -> torch.Tensor:
    """[Σ sizes, ...]: every rank's rows, end to end. Gloo gathers equal shares only, but sends unequal ones."""
    gathered = own.new_empty(sum(sizes), *own.shape[1:])
    copies = own.repeat(group.size(), *(1,) * (own.dim() - 1))
    dist.all_to_all_single(gathered, copies, list(sizes), [len(own)] * group.size(), group=group)
    return gathered


def reduce_scatter_uneven(parts: torch.Tensor, group: dist.ProcessGroup, sizes: Sequence[int]) -> torch.Tensor:
    """[sizes[rank], ...]: the sum over ranks of what each of them has for this one."""
    mine = sizes[group.rank()]
    received = parts.new_empty(group.size() * mine, *parts.shape[1:])
    dist.all_to_all_single(received, parts.contiguous(), [mine] * group.size(), list(sizes), group=group)
    return received.view(group.size(), mine, *parts.shape[1:]).sum(0)
