"""Turn images into what a model's vision tower reads, by the processor that lies beside its weights."""

import base64
import io
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megarl.errors import ConfigError
from megarl.host.reading import MODEL_REMEDY, read_object, reason_of
from megarl.vision.recent import Recent
from megarl.vision.store import ImageStore
from megarl.vision.torchvision_part import import_torchvision

if TYPE_CHECKING:
    import torch
    from PIL.Image import Image

# Inputs of towers that a process keeps: a screenshot's take 39 MB.
_KEPT_BYTES = 1 << 30
# Pillow has further ones, some of which start other programs.
_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")


def open_image(image: bytes, max_pixels: int | None = None) -> "Image":
    """Decode an image as vLLM's server does: upright as its file says, and on white where it is transparent.

    Raises ConfigError for bytes that are no image or a damaged one, for more than 8 bits a channel, and for too many
    pixels, before these take memory.
    """
    from PIL import Image, ImageOps

    try:
        opened = Image.open(io.BytesIO(image), formats=_FORMATS)
        width, height = opened.size
        if opened.mode[0] in "IF":
            problem = f"has Pillow's mode {opened.mode}, of which most greys would be white; write 8 bits a channel"
        elif max_pixels is not None and width * height > max_pixels:
            problem = (
                f"has {width} × {height} pixels, more than data.max_image_pixels={max_pixels}; raise it, or make the "
                "image smaller"
            )
        else:
            upright = ImageOps.exif_transpose(opened)
            if upright.mode == "RGB" or not upright.has_transparency_data:
                return upright.convert("RGB")
            upright, white = upright.convert("RGBA"), Image.new("RGB", upright.size, "white")
            white.paste(upright, mask=upright.getchannel("A"))
            return white
    # Damaged files cause many of Python's errors.
    except Exception as error:
        expected = f"expected a whole file of the formats {', '.join(_FORMATS)}"
        raise ConfigError(f"the image does not open: {reason_of(error)}; {expected}") from error
    raise ConfigError(f"the image {problem}")


def data_url(image: bytes) -> str:
    """Return an image as a data URL, of the type that its bytes are of."""
    from PIL import Image

    kind = Image.MIME[str(Image.open(io.BytesIO(image), formats=_FORMATS).format)]
    return f"data:{kind};base64,{base64.b64encode(image).decode()}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageInputs:
    """An image as a model reads it.

    tensors: what its tower gets, by name. token_ids: what stands for it in a text. is_feature: whether the model reads
    a feature of the image in the place of each of these tokens. grid: rows and columns of features; None: the processor
    does not tell.
    """

    tensors: Mapping[str, "torch.Tensor"]
    token_ids: tuple[int, ...]
    is_feature: tuple[bool, ...]
    grid: tuple[int, int] | None

    @property
    def num_bytes(self) -> int:
        return sum(each.nbytes for each in self.tensors.values())


class ImageReader:
    """A reader of a store's images for a model, which caches those that were read last."""

    def __init__(self, model: Path, store: ImageStore) -> None:
        self._model, self.store = model, store
        self._kept = Recent[ImageInputs](_KEPT_BYTES, self._process, lambda inputs: inputs.num_bytes)
        self._measured = dict[tuple[int, int], ImageInputs]()
        self._loaded: Any = None

    @property
    def processor(self) -> Any:
        """Return the model's processor. This process must not have imported transformers before torchvision."""
        if self._loaded is None:
            import_torchvision()
            from transformers import AutoProcessor, dynamic_module_utils

            # Where no file names a class, transformers would ask the terminal whether to run the directory's code.
            dynamic_module_utils.TIME_OUT_REMOTE_CODE = 0
            try:
                loaded = AutoProcessor.from_pretrained(self._model, local_files_only=True, trust_remote_code=False)
            # Damaged files may cause any of Python's errors.
            except Exception as error:
                raise ConfigError(
                    f"{self._model}: the processor of images does not load: {reason_of(error)}; expected the files of "
                    "one that transformers itself has, since no code of a model is run"
                ) from error
            if getattr(loaded.image_processor, "do_pan_and_scan", False):
                raise ConfigError(
                    f"{self._model}: the processor reads further cuts of an image (do_pan_and_scan), which is not "
                    "supported; set it to false in preprocessor_config.json"
                )
            self._loaded = loaded
        return self._loaded

    def read(self, digest: str) -> ImageInputs:
        """Return what the model reads of the image with this digest. Raise ConfigError if its bytes are no image."""
        return self._kept[digest]

    def measure(self, size: tuple[int, int]) -> ImageInputs:
        """Return what the model reads of any image of this width and height, without tensors.

        The tokens depend on the size alone. Ranks and engines compare them with those of the image itself.
        """
        if size not in self._measured:
            from PIL import Image

            self._measured[size] = replace(self._inputs(Image.new("RGB", size)), tensors={})
        return self._measured[size]

    def _process(self, digest: str) -> ImageInputs:
        try:
            return self._inputs(open_image(self.store.read(digest)))
        except ConfigError as error:
            raise ConfigError(f"image {digest}: {error}") from error

    def _inputs(self, image: "Image") -> ImageInputs:
        import torch

        processor = self.processor
        # The image processor alone lacks settings of the whole one, such as Pixtral's sizes of patches.
        made = processor(text=[processor.image_token], images=[image], add_special_tokens=False, return_tensors="pt")
        (token_ids,) = made["input_ids"].tolist()
        # Not the processor's `image_token_id`, which may be that of a token written around the features.
        config = read_object(self._model / "config.json", remedy=MODEL_REMEDY, error=ConfigError)
        feature_id = config.get("image_token_id", config.get("image_token_index"))
        names = processor.image_processor.model_input_names
        grid = None
        if "image_grid_thw" in made:
            merge = processor.image_processor.merge_size
            _, rows, columns = made["image_grid_thw"][0].tolist()
            grid = rows // merge, columns // merge
        return ImageInputs(
            tensors={name: torch.as_tensor(made[name]) for name in names if name in made},
            token_ids=tuple(token_ids),
            is_feature=tuple(each == feature_id for each in token_ids),
            grid=grid,
        )
