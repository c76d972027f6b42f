"""The moving average of weights on one rank: small rates, and the rates at which it is one of the two models."""

import torch

from megarl.parallel.averaging import MovingAverage


def average_of(model: torch.nn.Linear, rate: float) -> MovingAverage:
    values = [{name: parameter.data.float() for name, parameter in model.named_parameters()}]
    return MovingAverage(rate=rate, chunks=[model], values=values, spec=None, of_adapters=False)  # type: ignore[list-item, arg-type]


def linear(value: float) -> torch.nn.Linear:
    model = torch.nn.Linear(1, 1, bias=False, dtype=torch.bfloat16)
    torch.nn.init.constant_(model.weight, value)
    return model


def test_a_small_rate_arrives_in_float32_but_not_in_bfloat16() -> None:
    """From 1 towards the next number of bfloat16, 1 + 2⁻⁷, of which 20 steps at 0.05 make 1 − 0.95²⁰ = 64 %."""
    teacher, actor, rounded = linear(1.0), linear(1 + 2**-7), torch.tensor([[1.0]], dtype=torch.bfloat16)
    average = average_of(teacher, 0.05)
    for _ in range(20):
        average.follow([actor])  # type: ignore[list-item]
        rounded.lerp_(actor.weight.data, 0.05)
    assert rounded.item() == 1.0
    torch.testing.assert_close(average.values[0]["weight"].item(), 1 + 2**-7 * (1 - 0.95**20), rtol=1e-6, atol=0.0)
    assert teacher.weight.item() == 1 + 2**-7


def test_what_does_not_change_and_rate_1_are_exact() -> None:
    teacher, actor = linear(0.1), linear(0.3)
    average_of(teacher, 1.0).follow([actor])  # type: ignore[list-item]
    assert torch.equal(teacher.weight, actor.weight)
    average = average_of(teacher, 0.07)
    average.follow([actor])  # type: ignore[list-item]
    assert torch.equal(average.values[0]["weight"], actor.weight.float())
