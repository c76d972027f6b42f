"""The task of coloured squares: what pictures show, what answers say, and the control's pictures."""

import io
from collections import Counter
from pathlib import Path

import pyarrow.parquet as pq
from PIL import Image

from megarl.rewards import score
from megarl_lab.recipes.tasks.generate import GenerateConfig
from megarl_lab.recipes.tasks.squares import generate_squares

SIZES = GenerateConfig(num_sft=400, num_train=200, num_val=100)
RED, WHITE = (220, 40, 40), (255, 255, 255)


def colours(image: bytes) -> list[tuple[int, int, int]]:
    """Of the middle of each square, row by row."""
    picture = Image.open(io.BytesIO(image))
    assert picture.size == (96, 96)
    return [picture.getpixel((32 * x + 16, 32 * y + 16)) for y in range(3) for x in range(3)]


def test_pictures_show_as_many_red_squares_as_the_answer_says(tmp_path: Path) -> None:
    files = generate_squares("squares", tmp_path, SIZES)
    shown, counts = {}, Counter[int]()
    for split in ("train", "val"):
        rows = pq.read_table(getattr(files, split)).to_pylist()
        shown[split] = {row["images"][0] for row in rows}
        for row in rows:
            (image,), truth = row["images"], row["reward_model"]["ground_truth"]
            assert str(colours(image).count(RED)) == truth
            assert score(row["data_source"], f"#### {truth}", truth, {}).correct
            assert not score(row["data_source"], f"#### {int(truth) + 1}", truth, {}).correct
            counts[int(truth)] += 1
    assert counts.keys() == set(range(5))
    # Pictures of validation are not trained on.
    assert not shown["train"] & shown["val"]
    right = 0
    for row in pq.read_table(files.sft).to_pylist():
        found, answer = colours(row["images"][0]), int(row["target"].removeprefix("#### "))
        assert answer in (found.count(RED), 9 - found.count(WHITE))
        right += answer == found.count(RED)
    # 0.4, and those without another colour, one in six of the rest.
    assert 0.4 <= right / 400 <= 0.6


def test_the_control_asks_the_same_of_grey_pictures(tmp_path: Path) -> None:
    seen, blind = (generate_squares(task, tmp_path / task, SIZES) for task in ("squares", "blind_squares"))
    for split in ("sft", "train", "val"):
        rows, others = (pq.read_table(getattr(files, split)).to_pylist() for files in (seen, blind))
        assert len({image for row in others for image in row["images"]}) == 1
        assert [{**row, "images": None} for row in rows] == [{**row, "images": None} for row in others]
