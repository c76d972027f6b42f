"""Engines that read images: log-probs are transformers', also after a sync of the tower, of the same images."""

import io
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from safetensors.torch import load_file, save_file

from megarl.cluster.roles import engine_spec
from megarl.config.vision import TowerPart
from megarl.types.messages import Vision
from megarl.weights.families import read_model_spec
from tests.e2e import family_engines
from tests.e2e.family_engines import read_twice
from tests.e2e.support import small_config
from tests.e2e.test_family_engines import NATS, trained_copy
from tests.e2e.test_rounded_engines import float8
from tests.helpers.rank_pool import RankPool
from tests.helpers.vision import VISION, ask_with_stray_placeholders, make_rows, picture, score_sequences

CASES: list[tuple[str, int, TowerPart]] = [
    ("qwen3_vl", 1, "all"),
    ("qwen2_5_vl", 1, "all"),
    ("qwen2_5_vl", 1, "projector"),
    ("qwen3_vl", 1, "none"),
    ("mistral3", 1, "all"),
    ("qwen3_5", 1, "all"),
    ("qwen3_vl", 2, "all"),
    ("internvl_qwen3", 1, "all"),
    ("glm4v_moe", 1, "all"),
    ("qwen3_vl_moe", 1, "all"),
    ("qwen3_5_moe", 1, "all"),
    ("internvl_qwen2", 1, "all"),
]


@pytest.mark.parametrize(
    ("family", "tp", "part"),
    [pytest.param(*case, marks=[] if i == 0 else pytest.mark.long) for i, case in enumerate(CASES)],
)
def test_an_engine_reads_images_as_transformers_do_before_and_after_a_sync(
    family: str, tp: int, part: TowerPart, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """Features of the same images, which it kept, would be those of the tower before."""
    with RankPool(1, timeout_s=280.0, preloaded=False) as pool:
        rows = pool.run(make_rows, family, tmp_path)[0]
        model, trained = tmp_path / "model", trained_copy(tmp_path / "model", tmp_path / "trained")
        spec = read_model_spec(model, tower=part)
        assert spec.tower is not None
        before, moved = load_file(model / "model.safetensors"), load_file(trained / "model.safetensors")
        sent = [name for name in spec.tower.names if name in spec.expected_tensors()]
        assert {"none": 0, "projector": 4, "all": 20}[part] <= len(sent)
        assert all((moved[name] - before[name]).norm() >= 1e-3 * before[name].norm() for name in sent)
        # What is not sent stays.
        kept = {name: before[name] for name in spec.tower.names if name not in sent}
        save_file({**moved, **kept}, trained / "model.safetensors", metadata={"format": "pt"})
        config = small_config(model, f"rollout.engine.tp={tp}", "rollout.engine.prefix_caching=true")
        vision = Vision(store=str(tmp_path / "images"), train=part)
        prompts, images = [row.token_ids.tolist() for row in rows], [row.images for row in rows]
        engine = replace(engine_spec(config), vision=vision, max_model_tokens=256)
        found = pool.run(family_engines.follow, engine, trained, prompts, images, max_tokens=12)[0]
        errors = list[float]()
        for path, scored in ((model, found.before), (trained, found.after)):
            # Transformers takes a placeholder that was sampled for that of an image.
            mark = rows[1].token_ids[rows[1].images[0].places[0]]
            ended = [[*each.token_ids.tolist(), mark] for each in scored.completions]
            texts = [each[: each.index(mark)] for each in ended]
            assert sum(map(len, texts)) > 40
            whole = [
                replace(
                    row,
                    token_ids=np.concatenate([row.token_ids, np.array(text, np.int32)]),
                    loss_mask=np.concatenate([row.loss_mask, np.ones(len(text), bool)]),
                )
                for row, text in zip(rows, texts, strict=True)
            ]
            expected = pool.run(score_sequences, family, tmp_path, path, whole)[0]
            told = [
                np.concatenate([prompt, done.logprobs[: len(text)]])
                for prompt, done, text in zip(scored.prompts, scored.completions, texts, strict=True)
            ]
            errors += [float(np.abs(a - b).max()) for a, b in zip(told, expected, strict=True)]
    record_property("nats", errors)
    assert max(errors) <= NATS, errors
    assert found.sent == found.received
    assert all({*sent} <= sums.keys() and kept.keys().isdisjoint(sums) for sums in found.sent)


def test_a_placeholder_that_was_sampled_is_a_token_like_any_other(tmp_path: Path) -> None:
    """It stands before a later image, or after one."""
    with RankPool(1, timeout_s=280.0, preloaded=False) as pool:
        rows, expected = pool.run(ask_with_stray_placeholders, "qwen3_vl", tmp_path)[0]
        spec = engine_spec(small_config(tmp_path / "model", "rollout.engine.prefix_caching=true"))
        engine = replace(spec, vision=Vision(store=str(tmp_path / "images")), max_model_tokens=256)
        prompts, images = [row.token_ids.tolist() for row in rows], [row.images for row in rows]
        found = pool.run(family_engines.score, engine, prompts, images)[0]
    for row, told, wanted in zip(rows, found, expected, strict=True):
        ends = told[row.num_prompt_tokens - 1 :]
        assert np.abs(ends * row.loss_mask - wanted).max() <= NATS


@pytest.mark.long
@pytest.mark.parametrize("part", ["none", "all"])
def test_a_rounded_engine_rounds_its_tower_at_the_start_and_by_syncs(part: TowerPart, tmp_path: Path) -> None:
    """What is not sent is rounded once."""
    model, trained = tmp_path / "model", tmp_path / "trained"
    with RankPool(1, timeout_s=280.0, preloaded=False) as pool:
        rows = pool.run(make_rows, "qwen3_vl", tmp_path)[0]
        trained_copy(model, trained)
        config = small_config(model, "rollout.engine.quantization=fp8_per_channel", "algo.correction.name=tis_upper")
        vision = Vision(store=str(tmp_path / "images"), train=part)
        engine = replace(engine_spec(config), vision=vision, max_model_tokens=256)
        prompts, images = [row.token_ids.tolist() for row in rows], [row.images for row in rows]
        found = pool.run(family_engines.follow, engine, trained, prompts, images, max_tokens=1)[0]
        for path, scored in ((model, found.before), (trained, found.after)):
            tensors = load_file(path / "model.safetensors")
            if part == "none":
                tensors |= {k: v for k, v in load_file(model / "model.safetensors").items() if "visual" in k}
            for name, weight in tensors.items():
                # Neither vocabularies nor embeddings of places are layers that are rounded.
                if weight.dim() == 2 and "embed" not in name and "lm_head" not in name:
                    tensors[name] = float8(weight, weight.abs().amax(1, keepdim=True))
            rounded = shutil.copytree(path, tmp_path / f"rounded-{path.name}")
            save_file(tensors, rounded / "model.safetensors", metadata={"format": "pt"})
            expected, exact = (
                pool.run(score_sequences, "qwen3_vl", tmp_path, each, rows)[0] for each in (rounded, path)
            )
            errors = [float(np.abs(a - b).max()) for a, b in zip(scored.prompts, expected, strict=True)]
            assert max(errors) <= NATS, errors
            assert min(float(np.abs(a - b).max()) for a, b in zip(expected, exact, strict=True)) > 1e-3


def drawn(mode: str, form: str = "PNG", **options: Any) -> bytes:
    """A picture in one of Pillow's modes; where it has an alpha channel, it fades from left to right."""
    image, out = Image.open(io.BytesIO(picture(4, 90, 60))), io.BytesIO()
    if mode.endswith("A"):
        image.putalpha(Image.linear_gradient("L").rotate(90).resize(image.size))
    (image if mode == image.mode else image.convert(mode)).save(out, form, **options)
    return out.getvalue()


TURNED = Image.Exif()
TURNED[0x0112] = 6  # as a camera that was held on its side writes it
ODD = {
    **{f"mode {mode}": drawn(mode) for mode in ("1", "L", "LA", "P", "RGBA")},
    "a palette with a colour that is transparent": drawn("P", transparency=3),
    "inks": drawn("CMYK", "JPEG"),
    "turned": drawn("RGB", "JPEG", exif=TURNED),
    "turned and transparent": drawn("RGBA", "WEBP", lossless=True, exif=TURNED),
    "of two frames": drawn("RGB", "GIF", save_all=True, append_images=[Image.new("RGB", (90, 60))]),
}
# The shortest side whose length is refused beside one pixel; processors with squares of one size refuse none.
TOO_LONG = {"mistral3": 113, "internvl_qwen3": 10**9, "gemma3": 10**9}


@pytest.mark.parametrize(
    ("family", "count"),
    [("qwen2_5_vl", 12), *(pytest.param(family, 1000, marks=pytest.mark.long) for family in VISION)],
)
def test_trainer_and_engine_read_images_of_any_size_as_the_same_tokens(tmp_path: Path, family: str, count: int) -> None:
    """Other places are an error that names the row, as are sizes that the model's processor refuses."""
    drawn_sizes = np.exp(np.random.default_rng(0).uniform(0, np.log(400), (count, 2))).astype(int)
    sizes = [(1, 1), (1, 100), (100, 1), (3, 3), (300, 1), (1, 5000), *map(tuple, drawn_sizes.tolist()), (30, 40)]
    shown = [*ODD.items(), *((f"row {w}x{h}", picture(i, w, h)) for i, (w, h) in enumerate(sizes))]
    with RankPool(1, timeout_s=580.0, preloaded=False) as pool:
        pool.run(make_rows, family, tmp_path)
        spec = replace(engine_spec(small_config(tmp_path / "model")), vision=Vision(store=str(tmp_path / "images")))
        *thin, wrong = pool.run(read_twice, spec, tmp_path, shown)[0]
    longest = TOO_LONG.get(family, 201)
    assert [each.split(":")[0] for each in thin] == [
        f"row {w}x{h}" for w, h in sizes if max(w, h) >= longest * min(w, h)
    ]
    assert all(re.search(r"the model's processor refuses \d+ × \d+ pixels: .*; leave it out$", each) for each in thin)
    assert re.match(r"row 30x40: image \w{64} has \d+ places from token \d+ on, but the engine reads", wrong)
