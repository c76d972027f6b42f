"""Turn images into what a model's vision tower reads, by the processor that lies beside its weights."""

import io
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megarl.errors import ConfigError
from megarl.vision.store import ImageStore
from megarl.vision.torchvision_part import import_torchvision

# Inputs of towers that a process keeps: a screenshot's take 39 MB.
_KEPT_BYTES = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageInputs:
    """An image as a model reads it.

    tensors: what its tower gets, by name. token_ids: what stands for it in a text. is_feature: whether the model reads
    a feature of the image in the place of each of these tokens. grid: rows and columns of features; None: the processor
    does not tell.
    """

    tensors: Mapping[str, torch.Tensor]
    token_ids: tuple[int, ...]
    is_feature: tuple[bool, ...]
    grid: tuple[int, int] | None

    @property
    def num_bytes(self) -> int:
        return sum(each.nbytes for each in self.tensors.values())


class ImageReader:
    """Reads the images of a store for a model, and keeps those that were read last."""

    def __init__(self, model: Path, store: ImageStore) -> None:
        self._model, self._store = model, store
        self._kept = OrderedDict[str, ImageInputs]()
        self._loaded: Any = None

    @property
    def processor(self) -> Any:
        """Return the model's processor, of transformers' class, which this process must not have imported before."""
        if self._loaded is None:
            import_torchvision()
            from transformers import AutoProcessor

            self._loaded = AutoProcessor.from_pretrained(self._model)
        return self._loaded

    def read(self, digest: str) -> ImageInputs:
        """Return what the model reads of an image. Raise ConfigError if its bytes are no image."""
        inputs = self._kept.pop(digest, None) or self._process(digest)
        self._kept[digest] = inputs
        size = sum(each.num_bytes for each in self._kept.values())
        while size > _KEPT_BYTES and len(self._kept) > 1:
            size -= self._kept.popitem(last=False)[1].num_bytes
        return inputs

    def _process(self, digest: str) -> ImageInputs:
        from PIL import Image, ImageOps, UnidentifiedImageError

        data, processor = io.BytesIO(self._store.read(digest)), self.processor
        try:
            # As transformers and vLLM open images.
            image = ImageOps.exif_transpose(Image.open(data)).convert("RGB")
        except (UnidentifiedImageError, OSError, Image.DecompressionBombError) as error:
            raise ConfigError(f"image {digest}: {error}; expected a file that Pillow reads") from error
        # Alone, an image processor knows not all of what the whole one does, such as Pixtral's sizes of patches.
        made = processor(text=[processor.image_token], images=[image], add_special_tokens=False, return_tensors="pt")
        (token_ids,) = made["input_ids"].tolist()
        names = processor.image_processor.model_input_names
        grid = None
        if "image_grid_thw" in made:
            merge = processor.image_processor.merge_size
            _, rows, columns = made["image_grid_thw"][0].tolist()
            grid = rows // merge, columns // merge
        return ImageInputs(
            tensors={name: torch.as_tensor(made[name]) for name in names if name in made},
            token_ids=tuple(token_ids),
            is_feature=tuple(each == processor.image_token_id for each in token_ids),
            grid=grid,
        )
