"""Weights of a process reach another one on the same device, bit for bit, without the host's memory or through it."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest
import torch

from tests.helpers.cuda import needs_devices
from tests.helpers.gpu_ranks import exchange_beside_expandable_segments, exchange_on_device
from tests.helpers.rank_pool import RankPool

pytestmark = [pytest.mark.gpu, needs_devices(1)]


def make_values() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "a": torch.randint(-(2**31), 2**31, (1000, 333), generator=generator, dtype=torch.int32).view(torch.float32),
        "b": torch.randint(-(2**15), 2**15, (77, 5), generator=generator, dtype=torch.int16).view(torch.bfloat16),
    }


def require_both_transfers(
    received: Sequence[Mapping[str, torch.Tensor]], values: Mapping[str, torch.Tensor], directory: Path
) -> None:
    for transfer, tensors in enumerate(received):
        assert tensors.keys() == values.keys()
        for name, value in values.items():
            expected = value.view(torch.uint8) if transfer == 0 else value.view(torch.uint8).bitwise_not()
            assert torch.equal(tensors[name].view(torch.uint8), expected)
    assert not list(directory.iterdir())


@pytest.mark.parametrize("wire", ["CUDA IPC", "shared memory"])
def test_neighbours_exchange_on_their_device(wire: str, gpu_pool: Callable[[int], RankPool], tmp_path: Path) -> None:
    """In buckets much smaller than the tensors, so that segments are used again and again."""
    values = make_values()
    (received,) = gpu_pool(1).run(exchange_on_device, values, str(tmp_path), wire)
    require_both_transfers(received, values, tmp_path)


def test_what_is_shared_lies_in_no_expandable_segment(gpu_pool: Callable[[int], RankPool], tmp_path: Path) -> None:
    """Everything else of a rank does."""
    values = make_values()
    ((received, shared, others),) = gpu_pool(1).run(exchange_beside_expandable_segments, values, str(tmp_path))
    require_both_transfers(received, values, tmp_path)
    assert shared == {False}
    assert True in others
