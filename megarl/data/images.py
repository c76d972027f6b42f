"""Read the images of rows: check each, and insert the tokens by which a model reads it."""

import base64
import binascii
import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np

from megarl.config.schema import DataConfig
from megarl.data.files import RowFiles
from megarl.data.written import read_structure
from megarl.errors import ConfigError, DataError
from megarl.host.reading import reason_of
from megarl.types import Message, RowImage
from megarl.types.turns import IMAGE_MARK
from megarl.vision.reader import ImageReader, open_image
from megarl.vision.store import ImageStore
from megarl.vision.torchvision_part import import_torchvision

# Keys of a part of a turn that hold its image, by the names that OpenAI and others give them.
_PART_KEYS = ("image_url", "image", "url", "path", "bytes")


class Expanded(NamedTuple):
    """Token ids in which each mark of an image has become what a model reads there. origins: by token, its number among
    those before, -1 for an image's. images: what the tokens show.
    """

    token_ids: list[int]
    origins: list[int]
    images: tuple[RowImage, ...]


@dataclass(slots=True)
class DataImages:
    """The images of a run's data sets, read for one model. Each different one is decoded once, to find damage.

    keeps: whether images that are read from now on are put into the reader's store.
    """

    reader: ImageReader
    form: DataConfig
    keeps: bool = False
    _sizes: dict[str, tuple[int, int]] = field(default_factory=dict)

    @classmethod
    def of(cls, model: str, form: DataConfig, directory: str | None) -> "DataImages | None":
        """Return the images of a run with the model that keeps them in a directory; None: its rows are texts alone.

        To be called before transformers is imported.
        """
        if directory is None:
            return None
        import_torchvision()
        return cls(ImageReader(Path(model), ImageStore(Path(directory))), form)

    def of_row(self, files: RowFiles, index: int, row: Mapping[str, object]) -> "RowsImages":
        """Return the images of a row."""
        value = row.get(str(self.form.image_key))
        where = files.where(index)
        value = read_structure(value, f"{where}: {self.form.image_key}")
        listed = value if isinstance(value, list | tuple) else [] if value in (None, "") else [value]
        return RowsImages(self, where, files.file_of(index).parent, [*listed])

    def add(self, image: bytes, where: str) -> str:
        """Return the digest of an image; DataError, which names the place, if a model cannot read it."""
        digest = hashlib.sha256(image).hexdigest()
        if digest not in self._sizes:
            try:
                self._sizes[digest] = open_image(image, self.form.max_image_pixels).size
            except ConfigError as error:
                raise DataError(f"{where}: {error}") from error
        if self.keeps:
            self.reader.store.put(image)
        return digest

    def expand(
        self, token_ids: Sequence[int], messages: Sequence[Message], digests: Sequence[str], where: str
    ) -> Expanded:
        """Write what a model reads of a chat's images in the place of their marks. digests: of these and further ones.

        Raises DataError, which names the row, for a text that has the model's own mark, and for a template that does
        not write one for each image.
        """
        processor = self.reader.processor
        own, mark = str(processor.image_token), int(processor.image_token_id)
        if (turn := next((i for i, each in enumerate(messages) if own in each.content), None)) is not None:
            raise DataError(
                f"{where}: turn {turn} of the role {messages[turn].role} has {own}, with which the model marks images; "
                f"write {IMAGE_MARK} in the place of each image, and remove other marks"
            )
        num_images = sum(each.content.count(IMAGE_MARK) for each in messages if each.has_images)
        if (count := list(token_ids).count(mark)) != num_images:
            raise DataError(
                f"{where}: the chat template writes {count} marks {own} for {num_images} images; give the model the "
                "template that it was published with"
            )
        ids, origins, images, left = list[int](), list[int](), list[RowImage](), iter(digests)
        for i, token in enumerate(token_ids):
            written: Sequence[int] = (token,)
            origin = i
            if token == mark:
                digest = next(left)
                try:
                    found = self.reader.measure(size := self._sizes[digest])
                except ValueError as error:  # of a processor, for a picture that is very narrow
                    refusal = f"the model's processor refuses {size[0]} × {size[1]} pixels: {reason_of(error)}"
                    raise DataError(f"{where}: image {len(images)}: {refusal}; leave it out") from error
                written, places = found.token_ids, len(ids) + np.flatnonzero(found.is_feature)
                images.append(RowImage(places=places.astype(np.int32), digest=digest, grid=found.grid))
                origin = -1
            ids += written
            origins += [origin] * len(written)
        return Expanded(token_ids=ids, origins=origins, images=tuple(images))


class RowsImages:
    """The images of one row, in the order of the marks in its texts. `digests`: those of the texts read so far.

    listed: the values of the row's column. directory: that of its file.
    """

    def __init__(self, data: DataImages, where: str, directory: Path, listed: Sequence[object]) -> None:
        self._data, self._where, self._directory, self._listed = data, where, directory, listed
        self._left, self._num_marks = iter(listed), 0
        self.digests: list[str] = []

    def text(self, content: object, place: str) -> tuple[object, bool]:
        """Return a turn's text, and whether its marks stand for images; that of a list of parts, in OpenAI's form.

        Anything else is returned as it is. DataError names the place of an image that cannot be read.
        """
        num_before = len(self.digests)
        if isinstance(content, list):
            texts = [self._part(part, f"{place}[{i}]") for i, part in enumerate(content)]
            content = "".join(texts)
        elif isinstance(content, str):
            self._take(content.count(IMAGE_MARK))
        return content, len(self.digests) > num_before

    def require_all(self) -> tuple[str, ...]:
        """Return the digests of all images; DataError unless each image has its mark and each mark its image."""
        if self._num_marks != len(self._listed):
            raise DataError(
                f"{self._where}: its texts have {self._num_marks} marks {IMAGE_MARK} for {len(self._listed)} images of "
                f"{self._data.form.image_key}; write one where each image stands"
            )
        return tuple(self.digests)

    def _part(self, part: object, place: str) -> str:
        kind = part.get("type") if isinstance(part, Mapping) else None
        # Parquet gives every part all fields of a struct.
        given = {key: each for key, each in part.items() if each is not None} if isinstance(part, Mapping) else {}
        if kind == "text" and isinstance(text := given.get("text"), str):
            self._take(text.count(IMAGE_MARK))
            return text
        if kind not in ("image", "image_url", "input_image"):
            raise DataError(f"{place} is {part!s:.60}, expected a part of type text, image or image_url")
        value = next((given[key] for key in _PART_KEYS if key in given), None)
        if value is None:
            self._take(1)
        else:
            self.digests.append(self._data.add(self._bytes(value, place), place))
        return IMAGE_MARK

    def _take(self, count: int) -> None:
        """Read the next images of the column, as many as there are marks."""
        for _, value in zip(range(count), self._left, strict=False):
            place = f"{self._where}: {self._data.form.image_key}[{self._num_marks}]"
            self.digests.append(self._data.add(self._bytes(value, place), place))
        self._num_marks += count

    def _bytes(self, value: object, place: str) -> bytes:
        """Return the bytes of an image: of a struct of Hugging Face, a data URL, base64, or the file of that name."""
        if isinstance(value, Mapping):
            value = next((value[key] for key in ("bytes", "url", "path") if value.get(key) is not None), None)
        if isinstance(value, bytes):
            return value
        if not isinstance(value, str) or not value:
            raise DataError(f"{place} is {value!r:.60}, expected the bytes of an image, its path, or a data URL")
        if value[:8].lower().startswith(("http://", "https://")):
            raise DataError(
                f"{place} is {value!r:.60}: a run fetches no images, which may change or vanish; write their bytes"
            )
        head, comma, text = value.partition(",")
        is_url = head.startswith("data:") and bool(comma)
        if not is_url and os.path.isfile(file := self._directory / value):
            return file.read_bytes()
        try:
            return base64.b64decode(text if is_url else value, validate=True)
        except (binascii.Error, ValueError) as error:
            raise DataError(
                f"{place} is {value!r:.60}, neither base64 nor a file of {self._directory}; write one of these"
            ) from error
