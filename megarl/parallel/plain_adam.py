"""Implement Adam for machines with neither Transformer Engine nor Apex, whose fused Adam Megatron expects.

Megatron itself falls back to torch's AdamW, whose state has another layout: Megatron 0.16 cannot load a checkpoint
into a distributed optimizer that has not made a step with it.
"""

import torch
from torch.optim.optimizer import ParamsT


class PlainAdam(torch.optim.Optimizer):
    """AdamW in plain PyTorch, with the state layout of fused CUDA Adam: `step` in the group, exp_avg and exp_avg_sq."""

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        adam_w_mode: bool = True,
        **_: object,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self.adam_w_mode = adam_w_mode

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
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
    """Make Megatron's optimizers of this process use `PlainAdam`. Call it before one is built."""
    import megatron.core.optimizer as mcore_optimizer
    import megatron.core.optimizer.distrib_optimizer as mcore_distributed

    mcore_optimizer.Adam = PlainAdam
    mcore_optimizer.USING_PYTORCH_OPTIMIZER = False
    mcore_distributed.Adam = PlainAdam
    # Checkpoints of the distributed optimizer load only if it takes Adam for a fused one, hence these two flags.
    mcore_distributed.HAVE_APEX_OR_TE = True
    mcore_distributed.USING_APEX_OPTIMIZER = True
