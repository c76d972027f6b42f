"""Images of rows: their places, their positions, and what rows with other images share."""

import pickle
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.types import Row
from megarl.types.forks import Fork
from megarl.types.images import RowImage, rope_positions, row_image
from megarl.types.prefixes import count_shared, family_order, held_prefixes
from megarl.types.rows import paths_of


def image(digest: str, *places: int, grid: tuple[int, int] | None = None) -> RowImage:
    return RowImage(places=np.array(places), digest=digest, grid=grid)


def row(tokens: list[int], *images: RowImage, prompt: int = 1) -> Row:
    return Row(
        uid="a",
        sample_index=0,
        token_ids=np.array(tokens, np.int32),
        num_prompt_tokens=prompt,
        loss_mask=np.ones(len(tokens) - prompt, bool),
        images=images,
    )


def test_positions_of_a_row_with_two_images() -> None:
    """One text token, 2 × 3 features, one token, 1 × 2 features, two tokens: by hand from Qwen2-VL's paper (2.1)."""
    images = [image("a", *range(1, 7), grid=(2, 3)), image("b", 8, 9, grid=(1, 2))]
    assert rope_positions(12, images).tolist() == [
        [0, 1, 1, 1, 1, 1, 1, 4, 5, 5, 7, 8],
        [0, 1, 1, 1, 2, 2, 2, 4, 5, 5, 7, 8],
        [0, 1, 2, 3, 1, 2, 3, 4, 5, 6, 7, 8],
    ]


@pytest.mark.parametrize(
    ("images", "message"),
    [
        ([image("x", 2, 1)], "image x has places .2, 1., expected ascending ones from 0 to 3"),
        ([image("x", 3, 4)], "ascending ones from 0 to 3"),
        ([image("x")], "ascending ones"),
        ([image("x", 1, 2), image("y", 2, 3)], "image y has places .2, 3., expected ascending ones from 3 to 3"),
        ([image("x", 1, 2, grid=(2, 2))], "image x has 2 places, expected 2 × 2"),
    ],
)
def test_images_that_do_not_fit_their_row_are_refused(images: list[RowImage], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        row([5, 5, 5, 5], *images)


def test_another_prompt_is_refused_beside_images() -> None:
    with pytest.raises(ValueError, match="row a/0: shows images"):
        row([5, 6, 7], image("x", 1)).after_prompt(np.array([1, 2]))


def test_paths_have_the_images_that_they_show() -> None:
    """The second branch goes on from the first token, and shows an image of its own."""
    forked = replace(row([1, 9, 9, 2, 9, 9, 3], image("x", 1, 2), image("y", 4, 5)), forks=(Fork(4, 0),))
    one, other = [path.row for path in paths_of([forked])]
    assert [(each.digest, each.places.tolist()) for each in one.images] == [("x", [1, 2])]
    assert [(each.digest, each.places.tolist()) for each in other.images] == [("y", [1, 2])]
    cut = replace(forked, forks=(Fork(4, 1),))
    with pytest.raises(ValueError, match="image x: a fork lies within it"):
        paths_of([cut])


@st.composite
def _rows(draw: st.DrawFn) -> list[Row]:
    """Rows of few distinct pieces: tokens that are a placeholder's id, too, and images of three places.

    Some pieces begin a branch, after a text token or an image's last.
    """
    rows = []
    for _ in range(draw(st.integers(2, 6))):
        tokens, images, forks, ends = [1], [], [], [0]
        for piece in draw(st.lists(st.sampled_from(["text", "ids", "a", "b"]), min_size=1, max_size=4)):
            if len(ends) > 1 and draw(st.booleans()):
                forks.append(Fork(len(tokens), draw(st.sampled_from(ends[:-1]))))
            if piece in "ab":
                images.append(image(piece, *range(len(tokens), len(tokens) + 3)))
            tokens += [2] if piece == "text" else [9] * 3
            ends.append(len(tokens) - 1)
        rows.append(replace(row([*tokens, 3], *images), forks=tuple(forks)))
    return rows


def _seen(each: Row) -> list[tuple[int, str, int]]:
    """What the model reads at each token, and the token that it follows."""
    digests = {int(place): shown.digest for shown in each.images for place in shown.places}
    follows = dict(each.forks)
    return [(int(token), digests.get(i, ""), follows.get(i, i - 1)) for i, token in enumerate(each.token_ids)]


@given(_rows())
def test_rows_share_what_a_model_reads_alike(rows: list[Row]) -> None:
    def common(a: Row, b: Row) -> int:
        pairs = list(zip(_seen(a), _seen(b), strict=False))
        return next((i for i, (x, y) in enumerate(pairs) if x != y), len(pairs))

    for a in rows:
        assert [count_shared(a, b) for b in rows] == [common(a, b) for b in rows]
    for i, (holder, count) in enumerate(held_prefixes(rows)):
        assert count == max((common(rows[i], other) for other in rows[:i]), default=0)
        assert not count or count == common(rows[i], rows[holder])
    order = family_order(rows)
    for k in range(1, len(order)):
        before = [common(rows[order[k]], rows[i]) for i in order[:k]]
        assert before[-1] == max(before)


def test_samples_of_a_screenshot_travel_without_its_bytes() -> None:
    """Four bytes for each of its 1,200 features: 16 samples weigh less than its 200 kB once."""
    shown = row_image(range(1, 1201), "d" * 64, (30, 40))
    with_image, without = (len(pickle.dumps(row([0] * 1300, *images))) for images in ((shown,), ()))
    assert 16 * (with_image - without) < 16 * 5_000 < 200_000
