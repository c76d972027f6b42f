"""Images by what they contain, and what a model reads of them."""

import io
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from megarl.errors import ConfigError
from megarl.vision import reader, torchvision_part
from megarl.vision.reader import ImageReader, open_image
from megarl.vision.store import ImageStore
from tests.helpers.vision import PICTURES, make_vision_model


def test_an_image_is_stored_once_and_found_by_what_it_contains(tmp_path: Path) -> None:
    store = ImageStore(tmp_path / "images")
    # SHA-256 of "abc", from FIPS 180-2.
    assert store.put(b"abc") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    assert store.put(b"abc") == store.put(b"abc")
    assert len(list((tmp_path / "images").iterdir())) == 1
    assert store.read(store.put(b"other")) == b"other"


def test_an_image_that_is_absent_or_damaged_is_named(tmp_path: Path) -> None:
    store = ImageStore(tmp_path)
    digest = store.put(b"abc")
    (tmp_path / digest).write_bytes(b"abd")
    with pytest.raises(ConfigError, match=rf"image .*{digest} has the digest a52d159f"):
        store.read(digest)
    with pytest.raises(ConfigError, match=r"image .*/beef does not exist; restore"):
        store.read("beef")


READ = """
from pathlib import Path
import sys
from megarl.vision.reader import ImageReader, open_image
from megarl.vision.store import ImageStore
found = ImageReader(Path(sys.argv[1]), ImageStore(Path(sys.argv[2])))
for digest in sys.argv[3:]:
    inputs = found.read(digest)
    processor = found.processor
    ids = {each == processor.image_token_id for each in inputs.token_ids}
    print(inputs.grid, len(inputs.token_ids), ids, set(inputs.is_feature), [*inputs.tensors["pixel_values"].shape])
print(type(processor.image_processor).__name__, "torchvision" in sys.modules)
"""


def test_a_model_reads_an_image_as_its_processor_does(tmp_path: Path) -> None:
    """In torchvision's way, and upright whatever the orientation that its file says."""
    store, model = ImageStore(tmp_path / "images"), make_vision_model(tmp_path / "model", "qwen3_vl")
    digests = [store.put(data) for data in (PICTURES["C"], _turned(PICTURES["C"]))]
    command = [sys.executable, "-c", READ, str(model), str(store.directory), *digests]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    # 60 × 120 points are enlarged to 4 · 32² at least: 2 × 4 squares of 32, each of 2 × 2 patches in two frames.
    assert done.stdout.splitlines()[-3:] == [
        "(4, 2) 8 {True} {True} [32, 1536]",
        "(2, 4) 8 {True} {True} [32, 1536]",
        "Qwen2VLImageProcessor True",
    ]


def test_what_is_no_image_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = ImageStore(tmp_path)
    found = ImageReader(tmp_path, store)
    monkeypatch.setattr(ImageReader, "processor", None)
    with pytest.raises(
        ConfigError, match=r"image \w+: the image does not open: cannot identify .*; expected a whole file"
    ):
        found.read(store.put(b"no image"))


@pytest.mark.parametrize(
    ("mode", "pixel", "options", "seen"),
    [
        # A fifth of the colour over four fifths of white.
        ("RGBA", (55, 105, 0, 51), {}, (215, 225, 204)),
        ("LA", (55, 51), {}, (215, 215, 215)),
        ("RGBA", (1, 2, 3, 0), {}, (255, 255, 255)),
        ("P", 3, {"transparency": 3}, (255, 255, 255)),
        ("P", 4, {"transparency": 3}, (12, 13, 14)),
        ("L", 7, {}, (7, 7, 7)),
        ("1", 1, {}, (255, 255, 255)),
    ],
)
def test_what_is_transparent_is_white(
    mode: str, pixel: tuple[int, ...] | int, options: dict[str, int], seen: tuple[int, int, int]
) -> None:
    out, image = io.BytesIO(), Image.new(mode, (2, 1), pixel)
    if mode == "P":
        image.putpalette([*range(256)] * 3)
    image.save(out, "PNG", **options)
    shown = open_image(out.getvalue())
    assert (shown.mode, shown.size, shown.getpixel((1, 0))) == ("RGB", (2, 1), seen)


@pytest.mark.parametrize(("kind", "form", "mode"), [("<u2", "PNG", "I;16"), ("<i4", "TIFF", "I"), ("<f4", "TIFF", "F")])
def test_more_than_eight_bits_a_channel_are_refused(kind: str, form: str, mode: str) -> None:
    """Pillow would cut greys at 255."""
    out = io.BytesIO()
    Image.fromarray(np.full((2, 2), 4096, kind)).save(out, form)
    with pytest.raises(ConfigError, match=f"the image has Pillow's mode {mode}, of which .*; write 8 bits a channel"):
        open_image(out.getvalue())


def test_a_processor_that_brings_code_is_refused_without_a_question(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By default, transformers asks the terminal where no file names the processor's class."""
    mark, named = tmp_path / "mark", {"image_processor_type": "Evil", "auto_map": {"AutoImageProcessor": "evil.Evil"}}
    (tmp_path / "evil.py").write_text(f"open({str(mark)!r}, 'w')\nclass Evil: pass\n")
    (tmp_path / "config.json").write_text('{"model_type": "qwen3_vl"}')
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(named))
    monkeypatch.setattr("builtins.input", lambda _: "y")
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr("transformers.dynamic_module_utils.TIME_OUT_REMOTE_CODE", 15)
    monkeypatch.setattr(reader, "import_torchvision", lambda: None)
    with pytest.raises(ConfigError, match=r"the processor of images does not load: Loading .*, since no code of a"):
        ImageReader(tmp_path, ImageStore(tmp_path)).processor  # noqa: B018
    assert not mark.exists()


def test_further_cuts_of_an_image_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cuts = SimpleNamespace(image_processor=SimpleNamespace(do_pan_and_scan=True))
    monkeypatch.setattr("transformers.AutoProcessor.from_pretrained", lambda *_, **__: cuts)
    monkeypatch.setattr(reader, "import_torchvision", lambda: None)
    with pytest.raises(
        ConfigError, match=r"reads further cuts of an image \(do_pan_and_scan\), which is not supported"
    ):
        ImageReader(tmp_path, ImageStore(tmp_path)).processor  # noqa: B018


def _turned(data: bytes) -> bytes:
    image, out = Image.open(io.BytesIO(data)), io.BytesIO()
    exif = image.getexif()
    exif[0x0112] = 6  # as a camera that was held on its side writes it
    image.save(out, "PNG", exif=exif)
    return out.getvalue()


def test_torchvision_that_is_not_installed_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("torchvision", "transformers"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(torchvision_part, "find_spec", lambda name: None)
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    with pytest.raises(ConfigError, match=f"needs torchvision, which is not in {tmp_path}/images; run `make install`"):
        torchvision_part.import_torchvision()


def test_torchvision_comes_before_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torchvision", raising=False)
    monkeypatch.setitem(sys.modules, "transformers", sys)
    with pytest.raises(RuntimeError, match="before transformers"):
        torchvision_part.import_torchvision()
