"""Give vLLM prompts with images as the run's own ids, with a place for each image, and never as text to expand."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from megarl.errors import DataError
from megarl.types.images import RowImage
from megarl.vision.reader import open_image
from megarl.vision.recent import Recent
from megarl.vision.store import ImageStore

if TYPE_CHECKING:
    from vllm import TokensPrompt
    from vllm.inputs.engine import MultiModalInput, TokensInput
    from vllm.renderers import BaseRenderer

# Images as towers read them that an engine keeps.
_KEPT_BYTES = 1 << 30
EnginePrompt: TypeAlias = "TokensPrompt | TokensInput | MultiModalInput"


def text_prompt(token_ids: Sequence[int], images: Sequence[RowImage], whose: str) -> EnginePrompt:
    """Return a prompt for an engine that reads no images."""
    from vllm import TokensPrompt

    assert not images, f"{whose} has images"
    return TokensPrompt(prompt_token_ids=list(token_ids))


def salted(prompt: EnginePrompt, salt: str) -> EnginePrompt:
    """Return a prompt whose keys and values only prompts of the same salt share in the prefix cache; "": all do."""
    if salt:
        prompt["cache_salt"] = salt
    return prompt


class ImagePrompts:
    """Makes prompts for an engine, which reads each image once and keeps those that it read last.

    renderer: the engine's own, which has its processor. store: the directory of the images.
    """

    def __init__(self, renderer: "BaseRenderer[Any]", store: Path) -> None:
        self._renderer, self._store = renderer, ImageStore(store)
        self._kept = Recent["MultiModalInput"](_KEPT_BYTES, self._read, _num_bytes)

    def prompt(self, token_ids: Sequence[int], images: Sequence[RowImage], whose: str) -> EnginePrompt:
        """Return a prompt with images for vLLM; its caches know each image by its digest.

        Raises DataError, with `whose` prompt it is, if the engine reads an image as other tokens, or in other places.
        """
        from vllm.inputs.engine import mm_input, tokens_input
        from vllm.multimodal.inputs import MultiModalKwargsItems, PlaceholderRange

        ids = list(token_ids)
        if not images:
            return tokens_input(ids)
        items, ranges = [], []
        for image in images:
            alone = self._kept[image.digest]
            (found,) = alone["mm_placeholders"]["image"]
            features = range(found.length) if found.is_embed is None else found.is_embed.nonzero().flatten().tolist()
            start = int(image.places[0]) - features[0]
            expected = alone["prompt_token_ids"][found.offset : found.offset + found.length]
            places = start + np.asarray(features)
            if ids[start : start + found.length] != expected or not np.array_equal(places, image.places):
                raise DataError(
                    f"{whose}: image {image.digest} has {len(image.places)} places from token {image.places[0]} on, "
                    f"but the engine reads it as {found.length} tokens with {len(features)} features; trainer and "
                    "engines need the same files of the processor, and the same transformers and torchvision"
                )
            items.append(alone["mm_kwargs"]["image"][0])
            ranges.append(PlaceholderRange(offset=start, length=found.length, is_embed=found.is_embed))
        return mm_input(
            prompt_token_ids=ids,
            mm_kwargs=MultiModalKwargsItems({"image": items}),
            mm_hashes={"image": [image.digest for image in images]},
            mm_placeholders={"image": ranges},
        )

    def _read(self, digest: str) -> "MultiModalInput":
        """Return an image alone as the engine's own processor reads it."""
        processor = self._renderer.get_mm_processor().info.get_hf_processor()
        mark = processor.tokenizer.convert_tokens_to_ids(processor.image_token)
        image = open_image(self._store.read(digest))
        prompt = {"prompt_token_ids": [mark], "multi_modal_data": {"image": [image]}}
        (alone,) = self._renderer.render_cmpl([prompt], skip_mm_cache=True)
        return alone


def _num_bytes(alone: "MultiModalInput") -> int:
    (item,) = alone["mm_kwargs"]["image"]
    return sum(field.data.nbytes for field in item.values())
