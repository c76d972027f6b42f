"""Lets Megatron-Core run on a CPU: CUDA entry points answer for the CPU, RNG and Adam get CPU twins.

Megatron's sources are not edited. `install()` is idempotent per process and must run on the thread that will
call Megatron: torch function modes are thread-local.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from megarl.parallel import cpu_dispatch

CPU = torch.device("cpu")
_installed = False


class _CudaMeansCpu(TorchFunctionMode):
    """Sends tensors that Megatron asks for on CUDA to the CPU."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
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


class _Event:
    def __init__(self, *_: Any, **__: Any) -> None: ...

    def record(self, *_: Any) -> None: ...

    def wait(self, *_: Any) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True


class _Stream:
    def __init__(self, *_: Any, **__: Any) -> None: ...

    def wait_stream(self, *_: Any) -> None: ...

    def wait_event(self, *_: Any) -> None: ...

    def synchronize(self) -> None: ...

    def record_event(self, *_: Any) -> _Event:
        return _Event()


class CpuFusedAdam(torch.optim.Optimizer):
    """AdamW with the contract of the fused CUDA optimizers: `step` in the group, exp_avg and exp_avg_sq as state."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        adam_w_mode: bool = True,
        **_: Any,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self.adam_w_mode = adam_w_mode

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["step"] = step = int(group.get("step", 0)) + 1
            (beta1, beta2), lr, decay = group["betas"], group["lr"], group["weight_decay"]
            for param in group["params"]:
                if param.grad is None:
                    continue
                state, grad = self.state[param], param.grad
                if not state:
                    state["exp_avg"] = torch.zeros_like(param)
                    state["exp_avg_sq"] = torch.zeros_like(param)
                if decay and self.adam_w_mode:
                    param.mul_(1 - lr * decay)
                elif decay:
                    grad = grad.add(param, alpha=decay)
                state["exp_avg"].lerp_(grad, 1 - beta1)
                state["exp_avg_sq"].mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
                rms = (state["exp_avg_sq"] / (1 - beta2**step)).sqrt_().add_(group["eps"])
                param.addcdiv_(state["exp_avg"], rms, value=-lr / (1 - beta1**step))


def install() -> None:
    """Prepare this process; the second call does nothing."""
    global _installed
    if _installed:
        return
    _installed = True
    _replace_cuda_functions()
    import megatron.core.jit as mcore_jit

    # Before any other megatron module: they decorate functions at import.
    mcore_jit.disable_jit_fuser()
    _replace_rng_tracker()
    _replace_adam()
    cpu_dispatch.install()
    _enter_mode()


def _replace_cuda_functions() -> None:
    stream = _Stream()
    replacements: dict[str, Any] = {
        "current_device": lambda: CPU,
        "synchronize": lambda *_, **__: None,
        "current_stream": lambda *_, **__: stream,
        "default_stream": lambda *_, **__: stream,
        "stream": lambda *_, **__: contextlib.nullcontext(),
        "manual_seed": torch.manual_seed,
        "get_rng_state": lambda *_, **__: torch.get_rng_state(),
        "set_rng_state": lambda state, *_, **__: torch.set_rng_state(state),
        "Stream": _Stream,
        "Event": _Event,
    }
    for name, value in replacements.items():
        setattr(torch.cuda, name, value)


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


def _replace_adam() -> None:
    import megatron.core.optimizer as mcore_optimizer
    import megatron.core.optimizer.distrib_optimizer as mcore_distributed

    mcore_optimizer.Adam = CpuFusedAdam
    mcore_optimizer.USING_PYTORCH_OPTIMIZER = False
    mcore_distributed.Adam = CpuFusedAdam
    # With these two the distributed optimizer's checkpoints load; it must take Adam for a fused one.
    mcore_distributed.HAVE_APEX_OR_TE = True
    mcore_distributed.USING_APEX_OPTIMIZER = True


def _enter_mode() -> None:
    _CudaMeansCpu().__enter__()
    run_backward = torch.autograd._engine_run_backward

    def run_backward_with_mode(*args: Any, **kwargs: Any) -> Any:
        # Autograd's entry points pop function modes; custom backwards and recompute need ours.
        with _CudaMeansCpu():
            return run_backward(*args, **kwargs)

    torch.autograd._engine_run_backward = run_backward_with_mode
