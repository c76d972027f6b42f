"""AdamW in plain PyTorch against torch's."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from megarl.parallel.plain_adam import PlainAdam

OPTIONS: dict[str, Any] = {"lr": 0.03, "betas": (0.8, 0.95), "eps": 1e-3, "weight_decay": 0.1}


@pytest.mark.parametrize(
    ("reference", "adam_w_mode"), [(torch.optim.AdamW, True), (torch.optim.Adam, False)], ids=["adamw", "adam"]
)
def test_five_steps_equal_torch(reference: Callable[..., torch.optim.Optimizer], adam_w_mode: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(4, 3, dtype=torch.float64, generator=generator)
    ours, theirs = (start.clone().requires_grad_() for _ in range(2))
    unused = torch.ones(2, requires_grad=True)
    fused = PlainAdam([ours, unused], adam_w_mode=adam_w_mode, **OPTIONS)
    plain = reference([theirs], **OPTIONS)
    for step in range(5):
        gradient = torch.randn(4, 3, dtype=torch.float64, generator=generator)
        ours.grad, theirs.grad = gradient.clone(), gradient.clone()
        if step == 3:
            for optimizer in (fused, plain):
                optimizer.param_groups[0]["lr"] = 0.003
        fused.step()
        plain.step()
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-14)
        assert torch.equal(ours.grad, gradient)
    assert torch.equal(unused, torch.ones(2))
    assert fused.param_groups[0]["step"] == 5
    torch.testing.assert_close(fused.state[ours]["exp_avg"], plain.state[theirs]["exp_avg"], rtol=0, atol=1e-14)
    torch.testing.assert_close(fused.state[ours]["exp_avg_sq"], plain.state[theirs]["exp_avg_sq"], rtol=0, atol=1e-14)
