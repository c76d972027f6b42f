"""A rank reads an image as who made its row did, or says which row it is."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from megarl.errors import DataError
from megarl.parallel.packing import PackAlignment, pack_rows
from megarl.parallel.tower import VisionTower
from megarl.types import Row, RowImage
from megarl.vision.reader import ImageInputs


def packed_image() -> object:
    row = Row(
        uid="a",
        sample_index=3,
        token_ids=np.array([5, 6, 6, 7], np.int32),
        num_prompt_tokens=3,
        loss_mask=np.ones(1, bool),
        images=(RowImage(places=np.array([1, 2], np.int32), digest="beef", grid=(1, 2)),),
    )
    (image,) = pack_rows([row], alignment=PackAlignment(tp=1, cp=1), device=torch.device("cpu")).images
    return image


@pytest.mark.parametrize(("count", "grid"), [(3, (1, 3)), (1, (1, 1)), (2, (2, 1)), (2, None)])
def test_an_image_that_is_read_otherwise_names_its_row(count: int, grid: tuple[int, int] | None) -> None:
    read = ImageInputs(tensors={}, token_ids=(9,) * count, is_feature=(True,) * count, grid=grid)
    tower = SimpleNamespace(reader=SimpleNamespace(read=lambda digest: read))
    with pytest.raises(DataError, match=rf"row a/3: image beef has {count} features here.*expected 2, .1, 2."):
        VisionTower.forward(tower, [packed_image()])
