"""Weights travel between devices bit for bit."""

from collections.abc import Callable

import pytest
import torch

from tests.helpers.cuda import needs_devices
from tests.helpers.gpu_ranks import exchange, offer_store
from tests.helpers.rank_pool import RankPool

pytestmark = [pytest.mark.gpu, needs_devices(2)]


def test_tensors_of_one_device_reach_the_other(gpu_pool: Callable[[int], RankPool]) -> None:
    generator = torch.Generator().manual_seed(0)
    # All bit patterns, NaNs among them; as many bytes as make no whole number of words.
    values = {
        "a": torch.randint(-(2**31), 2**31, (1000, 33), generator=generator, dtype=torch.int32).view(torch.float32),
        "b": torch.randint(-(2**15), 2**15, (7,), generator=generator, dtype=torch.int16).view(torch.bfloat16),
    }
    port, _ = gpu_pool(2).run(offer_store)
    _, received = gpu_pool(2).run(exchange, port, values)
    assert received.keys() == values.keys()
    for name, value in values.items():
        assert torch.equal(received[name].view(torch.uint8), value.view(torch.uint8))
