"""Let Megatron-Core run on a CPU by replacing its CUDA calls, random number generators and Adam with CPU versions.

Megatron's sources are not edited. Call `install()` on the thread that will call Megatron, because torch function modes
are thread-local. A second call in the same process does nothing.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

from megarl.parallel import plain_adam

CPU = torch.device("cpu")
_installed = False


class _CudaMeansCpu(TorchFunctionMode):
    """A torch function mode under which tensors that Megatron creates on or moves to CUDA stay on the CPU."""

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: Any = (), kwargs: dict[str, object] | None = None
    ) -> object:
        kwargs = kwargs or {}
        if func is torch.Tensor.cuda:
            return args[0]
        if kwargs:
            if str(kwargs.get("device", "")).startswith("cuda"):
                kwargs = {**kwargs, "device": CPU}
            if kwargs.get("pin_memory"):
                kwargs = {**kwargs, "pin_memory": False}
        if func is torch.Tensor.to and len(args) > 1 and str(args[1]).startswith("cuda"):
            args = (args[0], CPU, *args[2:])
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            # Megatron's optimizer sorts parameters by names such as torch.cuda.FloatTensor.
            return func(*args).replace("torch.", "torch.cuda.", 1)
        return func(*args, **kwargs)


class _Immediate:
    """A stand-in for torch.cuda.Stream and torch.cuda.Event on a CPU, where operations finish before they return."""

    def __init__(self, *_: object, **__: object) -> None: ...

    def wait(self, *_: object) -> None:
        """Return at once, because on a CPU all operations have already finished."""

    record = synchronize = wait_stream = wait_event = wait

    def record_event(self, *_: object) -> "_Immediate":
        return self


def install() -> None:
    """Replace everything in Megatron that needs CUDA by CPU versions, in this process. A second call does nothing."""
    global _installed
    if _installed:
        return
    _installed = True
    stream = _Immediate()
    replacements: dict[str, object] = {
        "current_device": lambda: CPU,
        "synchronize": lambda *_, **__: None,
        "current_stream": lambda *_, **__: stream,
        "default_stream": lambda *_, **__: stream,
        "stream": lambda *_, **__: contextlib.nullcontext(),
        "manual_seed": torch.manual_seed,
        "get_rng_state": lambda *_, **__: torch.get_rng_state(),
        "set_rng_state": lambda state, *_, **__: torch.set_rng_state(state),
        "Stream": _Immediate,
        "Event": _Immediate,
    }
    for name, value in replacements.items():
        setattr(torch.cuda, name, value)

    # Megatron's modules decorate functions when they are imported, and that alone loads the compiler for a second.
    compile_ = torch.compile
    torch.compile = lambda function: function  # type: ignore[assignment]
    try:
        import megatron.core.jit as mcore_jit
    finally:
        torch.compile = compile_
    mcore_jit.disable_jit_fuser()
    _replace_rng_tracker()
    plain_adam.install()
    _replace_dispatch()
    _replace_shard_collectives()

    _CudaMeansCpu().__enter__()
    run_backward = torch.autograd._engine_run_backward

    def run_backward_with_mode(*args: Any, **kwargs: Any) -> Any:
        # Autograd's entry points pop function modes, but custom backward functions and recompute need ours.
        with _CudaMeansCpu():
            return run_backward(*args, **kwargs)

    torch.autograd._engine_run_backward = run_backward_with_mode


def _share_storage(output: torch.Tensor, recomputed: torch.Tensor) -> None:
    storage = recomputed.untyped_storage()
    output.untyped_storage().resize_(storage.size())
    output.untyped_storage().copy_(storage)


def _replace_rng_tracker() -> None:
    import megatron.core.tensor_parallel.random as mcore_random

    class CpuRNGStatesTracker(mcore_random.CudaRNGStatesTracker):
        def add(self, name: str, seed: int) -> None:
            self._is_initialized = True
            assert seed not in self.seeds_
            assert name not in self.states_
            self.seeds_.add(seed)
            self.states_[name] = torch.Generator().manual_seed(seed).get_state()

        @contextlib.contextmanager
        def fork(self, name: str = mcore_random._MODEL_PARALLEL_RNG_TRACKER_NAME) -> Iterator[None]:
            outer = torch.get_rng_state()
            torch.set_rng_state(self.states_[name])
            try:
                yield
            finally:
                self.states_[name] = torch.get_rng_state()
                torch.set_rng_state(outer)

    mcore_random.CudaRNGStatesTracker = CpuRNGStatesTracker
    mcore_random._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
    mcore_random._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    # Newer Megatrons compile a C++ function for it.
    mcore_random._get_share_storage = lambda: _share_storage


def _replace_dispatch() -> None:
    """Make Megatron's exchange of tokens between expert-parallel ranks work without CUDA tensors and NCCL."""
    import megatron.core.tensor_parallel.mappings as mappings
    import megatron.core.transformer.moe.token_dispatcher as dispatcher

    gather_even, reduce_scatter_even = mappings._gather_along_first_dim, mappings._reduce_scatter_along_first_dim

    def on_host(tensor: torch.Tensor, as_numpy: bool = False, record_stream: bool = False) -> object:
        # Megatron converts only tensors on a CUDA device to arrays, but its callers rely on arrays.
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    def gather(
        input_: torch.Tensor,
        group: dist.ProcessGroup,
        output_split_sizes: Sequence[int] | None = None,
        use_global_buffer: bool = False,
    ) -> torch.Tensor:
        """Gather all ranks' rows, end to end: [Σ sizes, ...]. Gloo's own all-gather needs equal sizes."""
        if output_split_sizes is None or group.size() == 1:
            return gather_even(input_, group, output_split_sizes, use_global_buffer)
        gathered = input_.new_empty(sum(output_split_sizes), *input_.shape[1:])
        copies = input_.repeat(group.size(), *(1,) * (input_.dim() - 1))
        own = [len(input_)] * group.size()
        dist.all_to_all_single(gathered, copies, list(output_split_sizes), own, group=group)
        return gathered

    def reduce_scatter(
        input_: torch.Tensor,
        group: dist.ProcessGroup,
        input_split_sizes: Sequence[int] | None = None,
        use_global_buffer: bool = False,
    ) -> torch.Tensor:
        """Return this rank's block of rows, summed over ranks: [sizes[rank], ...]. Block sizes may differ."""
        if input_split_sizes is None or group.size() == 1:
            return reduce_scatter_even(input_, group, input_split_sizes, use_global_buffer)
        mine = input_split_sizes[group.rank()]
        received = input_.new_empty(group.size() * mine, *input_.shape[1:])
        own = [mine] * group.size()
        dist.all_to_all_single(received, input_.contiguous(), own, list(input_split_sizes), group=group)
        return received.view(group.size(), mine, *input_.shape[1:]).sum(0)

    dispatcher.maybe_move_tensor_to_cpu = on_host
    mappings._gather_along_first_dim = gather
    mappings._reduce_scatter_along_first_dim = reduce_scatter


def _replace_shard_collectives() -> None:
    """Let the distributed optimizer exchange shards by `gloo_shards` in its synchronous calls."""
    import megatron.core.distributed.param_and_grad_buffer as buffers

    from megarl.parallel import gloo_shards

    gather, scatter = buffers.dist_all_gather_func, buffers.dist_reduce_scatter_func

    def all_gather(output: torch.Tensor, input_: torch.Tensor, group: dist.ProcessGroup, async_op: bool) -> Any:
        if async_op:
            return gather(output, input_, group=group, async_op=True)
        return gloo_shards.all_gather(output, input_, group)

    def reduce_scatter(
        output: torch.Tensor,
        input_: torch.Tensor,
        op: dist.ReduceOp.RedOpType,
        group: dist.ProcessGroup,
        async_op: bool,
    ) -> Any:
        if async_op or op != dist.ReduceOp.SUM:
            return scatter(output, input_, op=op, group=group, async_op=async_op)
        return gloo_shards.reduce_scatter(output, input_, group)

    buffers.dist_all_gather_func, buffers.dist_reduce_scatter_func = all_gather, reduce_scatter
