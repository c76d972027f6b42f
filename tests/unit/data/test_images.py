"""Images of rows: the forms that data have them in, what is refused, and the tokens by which a model reads them."""

import base64
import contextlib
import hashlib
import io
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from megarl.config.algo import DemonstrationConfig
from megarl.config.generation import Sampling
from megarl.config.schema import DataConfig, SftConfig
from megarl.data.demonstrations import SftDataset
from megarl.data.files import RowFiles
from megarl.data.images import DataImages
from megarl.data.preferences import ResponsePairDataset, mismatched_rows
from megarl.data.prompts import PromptDataset
from megarl.data.records import parse_prompt, prompt_columns
from megarl.errors import DataError
from megarl.rollout.source import Prefix, SamplingPlan
from megarl.rollout.vllm_source import _begin
from megarl.types import Message, row_from_sample
from megarl.vision.reader import ImageInputs, ImageReader
from megarl.vision.store import ImageStore
from megarl_lab.recipes.tiny_model import make_byte_tokenizer
from tests.helpers.vision import CHAT_TEMPLATE

FORM = DataConfig(
    image_key="images", label_key="answer", default_source="s", max_image_pixels=200, max_prompt_tokens=90
)
MARK, MARK_ID = "<|image_pad|>", 264


def png(seed: int = 0, width: int = 4, height: int = 3) -> bytes:
    out = io.BytesIO()
    Image.fromarray(np.random.default_rng(seed).integers(0, 255, (height, width, 3), np.uint8)).save(out, "PNG")
    return out.getvalue()


def digest(seed: int = 0) -> str:
    return hashlib.sha256(png(seed)).hexdigest()


def coded(seed: int = 0) -> str:
    return base64.b64encode(png(seed)).decode()


@pytest.fixture
def images(tmp_path: Path) -> DataImages:
    """Images of a model that reads one of 4 × 3 as a mark of its beginning and two features."""
    reader = ImageReader(tmp_path, ImageStore(tmp_path / "RUN/images"))
    reader._loaded = SimpleNamespace(image_token=MARK, image_token_id=MARK_ID, tokenizer=tokenizer())
    reader._measured[4, 3] = ImageInputs(
        tensors={}, token_ids=(9, MARK_ID, MARK_ID), is_feature=(False, True, True), grid=(1, 2)
    )
    return DataImages(reader, FORM)


def files(tmp_path: Path, row: dict[str, object]) -> RowFiles:
    (tmp_path / "red.png").write_bytes(png())
    path = tmp_path / ("rows.parquet" if has_bytes(row) else "rows.jsonl")
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist([row]), path)
    else:
        path.write_text(json.dumps(row) + "\n")
    return RowFiles([path], columns=prompt_columns(FORM))


def has_bytes(value: object) -> bool:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return isinstance(value, bytes) or any(map(has_bytes, inner))


def read(tmp_path: Path, row: dict[str, object], images: DataImages) -> tuple[Message, ...]:
    rows = files(tmp_path, {"answer": "1", **row})
    return parse_prompt(rows[0], rows.where(0), FORM, images.of_row(rows, 0, rows[0])).messages


URL = f"data:image/png;base64,{coded()}"
LOOK = "look <image> here"


def chat(*parts: object) -> list[dict[str, object]]:
    return [{"role": "user", "content": list(parts)}]


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": LOOK, "images": [png()]},
        {"prompt": LOOK, "images": png()},
        {"prompt": LOOK, "images": [{"bytes": png(), "path": None}]},
        {"prompt": LOOK, "images": [{"bytes": None, "path": "red.png"}]},
        {"prompt": LOOK, "images": "red.png"},
        {"prompt": LOOK, "images": ["red.png"]},
        {"prompt": LOOK, "images": json.dumps(["red.png"])},
        {"prompt": LOOK, "images": [coded()]},
        {"prompt": LOOK, "images": [{"bytes": coded()}]},
        {"prompt": LOOK, "images": [URL]},
        {"prompt": [{"role": "user", "content": LOOK}], "images": [URL]},
        {"prompt": chat({"type": "text", "text": "look "}, {"type": "image"}, {"type": "text", "text": " here"})}
        | {"images": ["red.png"]},
        {"prompt": chat({"type": "text", "text": LOOK}), "images": ["red.png"]},
        *(
            {"prompt": chat({"type": "text", "text": "look "}, part, {"type": "text", "text": " here"})}
            for part in (
                {"type": "image_url", "image_url": {"url": URL, "detail": "low"}},
                {"type": "image_url", "image_url": URL},
                {"type": "image", "image": URL},
                {"type": "image", "path": "red.png"},
            )
        ),
    ],
)
def test_a_row_has_its_images_in_many_forms(tmp_path: Path, images: DataImages, row: dict[str, object]) -> None:
    assert read(tmp_path, row, images) == (Message(role="user", content=LOOK, images=(digest(),)),)


def test_images_come_in_the_order_of_their_marks(tmp_path: Path, images: DataImages) -> None:
    part = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{coded(2)}"}}
    turns = [
        {"role": "user", "content": "<image>"},
        {"role": "assistant", "content": "yes"},
        {"role": "user", "content": [part, {"type": "text", "text": "and <image>"}]},
    ]
    messages = read(tmp_path, {"prompt": turns, "images": [coded(1), coded(3)]}, images)
    assert [each.content for each in messages] == ["<image>", "yes", "<image>and <image>"]
    assert [each.images for each in messages] == [(digest(1),), (), (digest(2), digest(3))]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": LOOK}, "its texts have 1 marks <image> for 0 images of images"),
        ({"prompt": "look", "images": ["red.png"]}, "0 marks <image> for 1 images"),
        ({"prompt": LOOK, "images": ["red.png"] * 2}, "1 marks <image> for 2 images"),
        ({"prompt": f"{LOOK} <image>", "images": ["red.png"]}, "2 marks <image> for 1 images"),
        ({"prompt": LOOK, "images": ["http://a/b.png"]}, r"images\[0\] is .*: a run fetches no images"),
        ({"prompt": LOOK, "images": [{"path": "HTTPS://a/b.png"}]}, "a run fetches no images"),
        ({"prompt": chat({"type": "image_url", "image_url": {"url": "https://a"}})}, r"content\[0\] is .* no images"),
        ({"prompt": LOOK, "images": ["absent.png"]}, "neither a data URL nor base64 nor a file of"),
        ({"prompt": LOOK, "images": [7]}, "is 7, expected the bytes of an image"),
        ({"prompt": LOOK, "images": [b"no image"]}, "does not open: cannot identify.*; expected a whole file of"),
        ({"prompt": LOOK, "images": [png()[:-30]]}, r"images\[0\]: the image does not open"),
        ({"prompt": LOOK, "images": [b"%!PS-Adobe-3.0 EPSF-3.0\n"]}, "does not open"),
        ({"prompt": LOOK, "images": [png(0, 20, 11)]}, "20 × 11 pixels, more than data.max_image_pixels=200; raise it"),
        *(
            ({"prompt": chat({"type": kind, kind: "x"})}, f"'type': '{kind}'.*, expected a part of type text, image or")
            for kind in ("video", "video_url", "audio", "input_audio")
        ),
        (
            {"prompt": [{"role": "user", "content": "?"}, {"role": "assistant", "content": "<image>"}]}
            | {"images": ["red.png"]},
            "an answer shows an image",
        ),
    ],
)
def test_images_that_cannot_be_read_name_their_row(
    tmp_path: Path, images: DataImages, row: dict[str, object], message: str
) -> None:
    rows = files(tmp_path, {"answer": "1", **row})
    with pytest.raises(DataError, match=rf"rows\.\w+ row 0.*{message}"):
        PromptDataset(rows.paths, tokenizer(), FORM, images=images)


def tokenizer() -> object:
    made = make_byte_tokenizer()
    made.add_special_tokens({"additional_special_tokens": [MARK]})
    assert made.convert_tokens_to_ids(MARK) == MARK_ID
    made.chat_template = CHAT_TEMPLATE.replace("MARK", MARK)
    return made


def test_a_prompt_has_the_tokens_of_its_images(tmp_path: Path, images: DataImages) -> None:
    rows = files(tmp_path, {"answer": "1", "prompt": LOOK, "images": ["red.png"]})
    encoder = tokenizer()
    data = PromptDataset(rows.paths, encoder, FORM, images=images)
    before, after = (encoder(text)["input_ids"] for text in ("<|im_start|>user\nlook ", " here<|im_end|>\n"))
    opened = encoder("<|im_start|>assistant\n")["input_ids"]
    assert list(data[0].token_ids) == [*before, 9, MARK_ID, MARK_ID, *after, *opened]
    (shown,) = data[0].images
    assert shown.places.tolist() == [len(before) + 1, len(before) + 2]
    assert (shown.digest, shown.grid) == (digest(), (1, 2))
    # Nothing is written before a run has its directory; then an image is, when its prompt is drawn.
    assert not (tmp_path / "RUN").exists()
    images.keeps = True
    assert data[0].images
    assert images.reader.store.read(digest()) == png()


@pytest.mark.parametrize(("room", "fits"), [(0, True), (-1, False)])
def test_an_image_takes_its_tokens_of_the_limit_of_a_prompt(
    tmp_path: Path, images: DataImages, room: int, fits: bool
) -> None:
    rows, encoder = files(tmp_path, {"answer": "1", "prompt": LOOK, "images": ["red.png"]}), tokenizer()
    text = "<|im_start|>user\nlook  here<|im_end|>\n<|im_start|>assistant\n"
    size = len(encoder(text)["input_ids"]) + 3
    form = replace(FORM, max_prompt_tokens=size + room, on_long_prompt="error")
    with contextlib.nullcontext() if fits else pytest.raises(DataError, match=rf"row 0.* {size} tokens"):
        PromptDataset(rows.paths, encoder, form, images=images)


@pytest.mark.parametrize("train_on", ["all", "each", "last", "every_token"])
def test_supervised_rows_show_images_and_never_train_them(tmp_path: Path, images: DataImages, train_on: str) -> None:
    turns = [
        {"role": "user", "content": "a <image>"},
        {"role": "assistant", "content": "one"},
        {"role": "user", "content": "<image> b"},
        {"role": "assistant", "content": "two"},
    ]
    path, encoder = tmp_path / "chats.jsonl", tokenizer()
    path.write_text(json.dumps({"messages": turns, "images": [coded(1), coded(2)]}) + "\n")
    data = SftDataset(
        [path],
        encoder,
        max_prompt_tokens=200,
        max_response_tokens=200,
        settings=SftConfig(train_on=train_on),
        form=FORM,
        images=images,
    )
    found = data.rows(range(len(data)))
    assert [[each.digest for each in row.images] for row in found] == (
        [[digest(1)], [digest(1), digest(2)]] if train_on == "each" else [[digest(1), digest(2)]]
    )
    for row in found:
        whole = np.concatenate([np.zeros(row.num_prompt_tokens, bool), row.loss_mask])
        shown = np.concatenate([each.places for each in row.images])
        assert (row.token_ids[shown] == MARK_ID).all()
        assert not whole[shown].any()
        assert not whole[shown[::2] - 1].any()
        trained = "".join(encoder.convert_ids_to_tokens(row.token_ids[whole])).replace("<|im_end|>", ".")
        assert trained.removesuffix("Ċ").endswith("one." if train_on == "each" and row is found[0] else "two.")


def test_a_demonstration_follows_a_prompt_with_images(tmp_path: Path, images: DataImages) -> None:
    """The sample that it begins shows the prompt's images; its own tokens are those that it has without any."""
    row = {"answer": "1", "prompt": LOOK, "images": ["red.png"], "target": "it is <image>"}
    rows, encoder = files(tmp_path, row), tokenizer()
    asked = DemonstrationConfig(strategy="fixed", max_tokens=50)
    (prompt,) = PromptDataset(rows.paths, encoder, FORM, images=images, demonstrations=asked)
    assert list(prompt.demonstration_ids) == encoder("it is <image><|im_end|>")["input_ids"]
    prefix = Prefix(token_ids=prompt.demonstration_ids, is_complete=True)
    plan = SamplingPlan(
        step=1,
        num_samples=1,
        sampling=Sampling(temperature=1.0),
        max_response_tokens=50,
        run_seed=0,
        prefixes={(prompt.uid, 0): prefix},
    )
    made = row_from_sample(_begin(prompt, plan, 0))
    assert [(each.digest, each.places.tolist()) for each in made.images] == [(digest(), [9, 10])]
    assert made.token_ids.tolist() == [*prompt.token_ids, *prompt.demonstration_ids]


IDS = """
import io, sys
import numpy as np
from pathlib import Path
from PIL import Image
from megarl.config.schema import DataConfig
from megarl.data.images import DataImages
from megarl.types import Message
form, path, count = DataConfig(image_key="images"), sys.argv[1], int(sys.argv[3])
images = DataImages.of(path, form, sys.argv[2])
processor, rng = images.reader.processor, np.random.default_rng(0)
for _ in range(count):
    pictures, digests = [], []
    for size in rng.integers(8, 260, (rng.integers(1, 4), 2)).tolist():
        out = io.BytesIO()
        Image.new("RGB", size, tuple(rng.integers(0, 255, 3).tolist())).save(out, "PNG")
        pictures.append(Image.open(out))
        digests.append(images.add(out.getvalue(), "here"))
    content = rng.choice(["\\n", " and "]).join(["<image>"] * len(pictures))
    message = Message(role="user", content=content, images=tuple(digests))
    text = message.content.replace("<image>", processor.image_token)
    ids = processor.tokenizer(text, add_special_tokens=False)["input_ids"]
    found = images.expand(ids, [message], "here")
    whole = processor(text=[text], images=[pictures], add_special_tokens=False, return_tensors="np")
    assert found.token_ids == whole["input_ids"][0].tolist(), [each.size for each in pictures]
    feature_id = getattr(processor.tokenizer, "image_token_id", None) or processor.image_token_id
    marked = np.flatnonzero(whole["input_ids"][0] == feature_id)
    assert np.concatenate([each.places for each in found.images]).tolist() == marked.tolist()
    if "image_grid_thw" in whole:
        merge = processor.image_processor.merge_size
        assert [each.grid for each in found.images] == [(h // merge, w // merge) for _, h, w in whole["image_grid_thw"]]
print("equal", count)
"""


@pytest.mark.parametrize(
    ("family", "count"),
    [
        ("qwen3_vl", 20),
        *(
            pytest.param(each, 1000, marks=pytest.mark.long)
            for each in ("qwen2_5_vl", "qwen3_vl", "qwen3_5", "mistral3", "internvl_qwen3", "glm4v_moe", "gemma3")
        ),
    ],
)
def test_tokens_are_those_of_the_whole_processor(tmp_path: Path, family: str, count: int) -> None:
    from tests.helpers.vision import make_vision_model

    model = make_vision_model(tmp_path / "model", family)
    done = subprocess.run(
        [sys.executable, "-c", IDS, str(model), str(tmp_path / "images"), str(count)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.endswith(f"equal {count}\n"), done.stderr


def test_a_session_is_given_images_as_parts(images: DataImages) -> None:
    from megarl.data.vocabulary import EVERY_TOKEN
    from megarl.run.session_inputs import SessionInputs

    given: dict[str, Any] = {"config": SimpleNamespace(data=FORM), "tokenizer": tokenizer(), "images": images}
    given |= dict.fromkeys(("spec", "answers", "algorithm", "prompts"))
    inputs = SessionInputs(**given, vocabulary=EVERY_TOKEN, roles=())
    url = {"type": "image_url", "image_url": {"url": URL}}
    asked, plain = inputs.encoded(
        [chat({"type": "text", "text": "look "}, url, {"type": "text", "text": " here"}), LOOK], draw=0
    )
    before, after = (given["tokenizer"](text)["input_ids"] for text in ("<|im_start|>user\nlook ", " here<|im_end|>\n"))
    opened = given["tokenizer"]("<|im_start|>assistant\n")["input_ids"]
    assert list(asked.token_ids) == [*before, 9, MARK_ID, MARK_ID, *after, *opened]
    assert [(each.digest, each.places.tolist()) for each in asked.images] == [
        (digest(), [len(before) + 1, len(before) + 2])
    ]
    # Without parts, a mark is text.
    assert plain.images == ()


def test_a_template_that_drops_images_is_refused(tmp_path: Path, images: DataImages) -> None:
    rows, encoder = files(tmp_path, {"answer": "1", "prompt": LOOK, "images": ["red.png"]}), tokenizer()
    encoder.chat_template = encoder.chat_template.replace(MARK, "")
    with pytest.raises(DataError, match=r"row 0: the chat template writes 0 marks <\|image_pad\|> for 1 images"):
        PromptDataset(rows.paths, encoder, FORM, images=images)


def test_a_text_with_the_models_own_mark_is_refused(tmp_path: Path, images: DataImages) -> None:
    rows = files(tmp_path, {"answer": "1", "prompt": f"{LOOK} {MARK}", "images": ["red.png"]})
    with pytest.raises(DataError, match=r"row 0: turn 0 of the role user has <\|image_pad\|>, .* write <image> in"):
        PromptDataset(rows.paths, tokenizer(), FORM, images=images)


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": LOOK, "chosen": "a <image>", "rejected": "b"},
        {"prompt": [{"role": "user", "content": LOOK}], "chosen": "a <image>", "rejected": "b"},
        {
            side: [{"role": "user", "content": LOOK}, {"role": "assistant", "content": answer}]
            for side, answer in (("chosen", "a"), ("rejected", "b"))
        },
    ],
)
def test_both_rows_of_a_pair_show_the_images_of_its_prompt(
    tmp_path: Path, images: DataImages, row: dict[str, object]
) -> None:
    path, limits = tmp_path / "pairs.jsonl", {"max_prompt_tokens": 90, "max_response_tokens": 90}
    path.write_text(json.dumps({**row, "images": [coded()]}) + "\n")
    data = ResponsePairDataset([path], tokenizer(), on_long="error", form=FORM, images=images, **limits)
    chosen, rejected = data.rows([0])
    for each in (chosen, rejected, *mismatched_rows([chosen, rejected])):
        (shown,) = each.images
        assert (each.token_ids[shown.places] == MARK_ID).all()
        assert (shown.digest, shown.grid) == (digest(), (1, 2))
    assert chosen.token_ids.tolist() != rejected.token_ids.tolist()
    images.keeps = True
    data.rows([0])
    assert images.reader.store.read(digest()) == png()
    path.write_text(json.dumps({**row, "images": [coded()] * 2}) + "\n")
    with pytest.raises(DataError, match=r"row 0: its texts have 1 marks <image> for 2 images"):
        ResponsePairDataset([path], tokenizer(), on_long="error", form=FORM, images=images, **limits)
