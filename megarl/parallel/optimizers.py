"""Derive the settings of Megatron's optimizers from the configuration; Megatron itself is not imported here."""

import torch

from megarl.config.schema import OptimizerConfig

# Float8 is what Transformer Engine's Adam calls bytes: it keeps a scale for each tensor of them.
_MOMENT_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float8": torch.uint8}


def optimizer_settings(config: OptimizerConfig, dtype: torch.dtype) -> dict[str, object]:
    """Return the arguments of Megatron's OptimizerConfig for weights of a data type."""
    settings: dict[str, object] = {
        "optimizer": config.algorithm,
        "lr": config.lr,
        "min_lr": config.lr * config.min_lr_frac,
        "adam_beta1": config.betas[0],
        "adam_beta2": config.betas[1],
        "adam_eps": config.eps,
        "weight_decay": config.weight_decay,
        "clip_grad": config.clip_grad_norm,
        "params_dtype": dtype,
        "bf16": dtype is torch.bfloat16,
        "use_distributed_optimizer": config.distributed,
        "overlap_param_gather": config.overlaps_param_gather,
    }
    if config.algorithm == "muon":
        settings |= {
            "muon_momentum": config.muon_momentum,
            "muon_extra_scale_factor": config.muon_scale,
            # Every tensor-parallel rank orthogonalizes the whole matrix: the result does not depend on the layout.
            "muon_tp_mode": "duplicated",
        }
    if config.is_precision_aware:
        settings |= {
            "use_precision_aware_optimizer": True,
            # Main parameters stay whole: checkpoints have them in float32.
            "store_param_remainders": False,
            "exp_avg_dtype": _MOMENT_DTYPES[config.exp_avg_dtype],
            "exp_avg_sq_dtype": _MOMENT_DTYPES[config.exp_avg_sq_dtype],
        }
    if config.offload_fraction:
        settings |= {
            "optimizer_cpu_offload": True,
            "optimizer_offload_fraction": config.offload_fraction,
            "overlap_cpu_optimizer_d2h_h2d": True,
        }
    return settings
