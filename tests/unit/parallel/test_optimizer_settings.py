"""What Megatron's optimizer and its gradients are told of the configuration, and where sums are rounded."""

import torch

from megarl.config.schema import OptimizerConfig
from megarl.parallel.head.gradients import WeightGradient
from megarl.parallel.optimizers import optimizer_settings

# Of what every one is told.
COMMON = {"optimizer": "adam", "use_distributed_optimizer": True, "overlap_param_gather": False, "clip_grad": 1.0}


def test_by_default_megatron_keeps_the_state() -> None:
    settings = optimizer_settings(OptimizerConfig(), torch.bfloat16)
    assert {name: settings[name] for name in COMMON} == COMMON
    assert not [name for name in settings if "precision_aware" in name or "offload" in name or "exp_avg" in name]


def test_moments_of_fewer_bits_are_transformer_engines() -> None:
    """Whose Adam is told of float8 as bytes."""
    small = OptimizerConfig(exp_avg_dtype="bfloat16", exp_avg_sq_dtype="float8")
    expected = {
        "use_precision_aware_optimizer": True,
        "store_param_remainders": False,
        "exp_avg_dtype": torch.bfloat16,
        "exp_avg_sq_dtype": torch.uint8,
    }
    assert optimizer_settings(small, torch.bfloat16) == optimizer_settings(OptimizerConfig(), torch.bfloat16) | expected


def test_a_share_of_the_state_is_on_the_host() -> None:
    """Megatron's hybrid optimizer takes the way of a precision-aware one, with float32 moments."""
    expected = {
        "use_precision_aware_optimizer": True,
        "store_param_remainders": False,
        "exp_avg_dtype": torch.float32,
        "exp_avg_sq_dtype": torch.float32,
        "optimizer_cpu_offload": True,
        "optimizer_offload_fraction": 0.25,
        "overlap_cpu_optimizer_d2h_h2d": True,
    }
    hybrid = optimizer_settings(OptimizerConfig(offload_fraction=0.25), torch.bfloat16)
    assert hybrid == optimizer_settings(OptimizerConfig(), torch.bfloat16) | expected


def test_muon_orthogonalizes_whole_matrices() -> None:
    expected = {"optimizer": "muon", "muon_momentum": 0.9, "muon_extra_scale_factor": 0.2, "muon_tp_mode": "duplicated"}
    muon = OptimizerConfig(algorithm="muon", distributed=False, muon_momentum=0.9)
    adam = optimizer_settings(OptimizerConfig(distributed=False), torch.bfloat16)
    assert optimizer_settings(muon, torch.bfloat16) == adam | expected


def test_the_heads_gradient_is_rounded_once_whatever_the_chunks() -> None:
    """1 + 2⁻⁸ + 2⁻⁸ is 1 + 2⁻⁷ in bfloat16, which has 8 bits; added one after the other to it, both would be lost."""
    weight, main = torch.zeros(1, 1, dtype=torch.bfloat16), torch.ones(1, 1, dtype=torch.bfloat16)
    gradient = WeightGradient(weight, main, wanted=True)
    for _ in range(2):
        gradient.add(torch.full((1, 1), 2.0**-8, dtype=torch.bfloat16), torch.ones(1, 1, dtype=torch.bfloat16))
    assert gradient.finish() is None
    assert main.item() == 1 + 2.0**-7
