"""Megatron's DDP and (distributed) AdamW around a policy."""

from collections.abc import Sequence
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


def wrap_ddp(chunks: Sequence[PolicyModel], config: OptimizerConfig) -> list[DistributedDataParallel]:
    """Data-parallel wrappers of a rank's model chunks: gradients are summed, not averaged, in float32."""
    ddp_config = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=config.distributed)
    wrapped = [DistributedDataParallel(chunk.config, ddp_config, chunk) for chunk in chunks]

    def finalize(models: list[Any], num_tokens: Any = None, **kwargs: Any) -> None:
        # The loss is already divided by global denominators: no second division by tokens.
        finalize_model_grads(models, None, **kwargs)

    chunks[0].config.finalize_model_grads_func = finalize
    return wrapped


def build_optimizer(chunks: Sequence[DistributedDataParallel], config: OptimizerConfig) -> MegatronOptimizer:
    """AdamW over the wrapped chunks; norms and biases are not decayed. bfloat16 parameters have float32 main ones."""
    dtype = chunks[0].module.config.params_dtype
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
        list(chunks),
    )
    for group in optimizer.param_groups:
        # Megatron leaves this to its own scheduler, which we do not use.
        group["weight_decay"] = config.weight_decay * group["wd_mult"]
    return optimizer


def set_learning_rate(optimizer: MegatronOptimizer, lr: float) -> None:
    """Give every parameter group this rate for the next step."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get("lr_mult", 1.0)
