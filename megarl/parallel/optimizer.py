"""Megatron's DDP and (distributed) AdamW around a policy."""

from typing import Any

import torch
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import MegatronOptimizer, get_megatron_optimizer
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig

from megarl.config.schema import OptimizerConfig
from megarl.parallel.model import PolicyModel


def wrap_ddp(policy: PolicyModel, config: OptimizerConfig) -> DistributedDataParallel:
    """Data-parallel wrapper: gradients are summed, not averaged, over ranks, in float32."""
    ddp_config = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=config.distributed)
    ddp = DistributedDataParallel(policy.config, ddp_config, policy)

    def finalize(models: list[Any], num_tokens: Any = None, **kwargs: Any) -> None:
        # The loss is already divided by global denominators: no second division by tokens.
        finalize_model_grads(models, None, **kwargs)

    policy.config.finalize_model_grads_func = finalize
    return ddp


def build_optimizer(ddp: DistributedDataParallel, config: OptimizerConfig) -> MegatronOptimizer:
    """AdamW over the wrapped policy; norms and biases are not decayed. bfloat16 parameters have float32 main ones."""
    dtype = ddp.module.config.params_dtype
    optimizer = get_megatron_optimizer(
        MegatronOptimizerConfig(
            optimizer="adam",
            lr=config.lr,
            min_lr=config.lr * config.min_lr_frac,
            adam_beta1=config.betas[0],
            adam_beta2=config.betas[1],
            adam_eps=config.eps,
            weight_decay=config.weight_decay,
            clip_grad=config.clip_grad_norm,
            params_dtype=dtype,
            bf16=dtype is torch.bfloat16,
            use_distributed_optimizer=config.distributed,
        ),
        [ddp],
    )
    for group in optimizer.param_groups:
        # Megatron leaves this to its own scheduler, which we do not use.
        group["weight_decay"] = config.weight_decay * group["wd_mult"]
    return optimizer


def set_learning_rate(optimizer: MegatronOptimizer, lr: float) -> None:
    """Give every parameter group this rate for the next step."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get("lr_mult", 1.0)
