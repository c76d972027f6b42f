"""Read the images of rows: check each, and insert the tokens by which a model reads it."""

import base64
import binascii
import hashlib
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import numpy as np

from megarl.config.schema import DataConfig
from megarl.data.files import RowFiles
from megarl.data.written import read_structure
from megarl.errors import ConfigError, DataError
from megarl.host.reading import reason_of
from megarl.types import Message, RowImage
from megarl.types.images import shifted
from megarl.types.turns import IMAGE_MARK
from megarl.vision.reader import ImageReader, data_url, open_image
from megarl.vision.store import ImageStore
from megarl.vision.torchvision_part import import_torchvision

# Types of parts that show an image, and the keys that hold it, by the names that OpenAI and others give them.
_KINDS = ("image", "image_url", "input_image")
_PART_KEYS = ("image_url", "image", "source", "data", "url", "path", "bytes")
_DIGEST = re.compile("[0-9a-f]{64}")


class Expanded(NamedTuple):
    """Token ids in which each mark of an image has become what a model reads there. origins: each token's index before
    that, -1 for an image's tokens. images: what the tokens show.
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

    @classmethod
    def unexpanded(cls, model: str, form: DataConfig) -> "DataImages":
        """Return images for checks that need no tokens."""
        return cls(ImageReader(Path(model), ImageStore(Path())), form)

    @contextmanager
    def kept_apart(self) -> Iterator[None]:
        """Within this context, keep the images that are read in a directory of their own."""
        before = self.reader.store, self.keeps
        with TemporaryDirectory(prefix="megarl-images-") as folder:
            self.reader.store, self.keeps = ImageStore(Path(folder)), True
            try:
                yield
            finally:
                self.reader.store, self.keeps = before

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

    def read(self, value: object) -> str:
        """Return the digest of an image of a reply, which is then kept; DataError if it cannot be read."""
        if isinstance(value, str) and _DIGEST.fullmatch(value):
            self._size(value)
            return value
        return self.add(_bytes_of(value, "an image of a reply", None), "an image of a reply")

    def url_of(self, digest: object) -> str:
        """Return an image that is kept as a data URL."""
        return data_url(self.reader.store.read(str(digest)))

    def _size(self, digest: str) -> tuple[int, int]:
        """Return the width and the height of an image, which another process may have kept."""
        if digest not in self._sizes:
            self._sizes[digest] = open_image(self.reader.store.read(digest)).size
        return self._sizes[digest]

    def expand(self, token_ids: Sequence[int], messages: Sequence[Message], where: str) -> Expanded:
        """Write what a model reads of a chat's images in the place of their marks.

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
        digests = [str(image) for each in messages for image in each.images]
        if (count := list(token_ids).count(mark)) != len(digests):
            raise DataError(
                f"{where}: the chat template writes {count} marks {own} for {len(digests)} images; give the model the "
                "template that it was published with"
            )
        ids, origins, images, left = list[int](), list[int](), list[RowImage](), iter(digests)
        borders = list[int]()
        for i, token in enumerate(token_ids):
            written: Sequence[int] = (token,)
            origin = i
            if token == mark:
                digest = next(left)
                try:
                    found = self.reader.measure(size := self._size(digest))
                except ValueError as error:  # of a processor, for a picture that is very narrow
                    refusal = f"the model's processor refuses {size[0]} × {size[1]} pixels: {reason_of(error)}"
                    raise DataError(f"{where}: image {len(images)}: {refusal}; leave it out") from error
                written, places = found.token_ids, len(ids) + np.flatnonzero(found.is_feature)
                images.append(RowImage(places=places.astype(np.int32), digest=digest, grid=found.grid))
                origin = -1
                borders += [len(ids), len(ids) + len(written)]
            ids += written
            origins += [origin] * len(written)
        special = {*processor.tokenizer.all_special_ids}
        for border in reversed(borders):
            pair = ids[border - 1 : border + 1] if border else []
            # One token may stand for the line feeds that end here and those that begin.
            if not special.isdisjoint(pair) or not (text := processor.tokenizer.decode(pair)).isspace():
                continue
            joined = processor.tokenizer(text, add_special_tokens=False)["input_ids"]
            ids[border - 1 : border + 1], origins[border - 1 : border + 1] = joined, [-1] * len(joined)
            first = sum(each.places[0] < border for each in images)
            images[first:] = shifted(images[first:], len(joined) - 2)
        return Expanded(token_ids=ids, origins=origins, images=tuple(images))


class RowsImages:
    """The images of one row, in the order of the marks in its texts.

    listed: the values of the row's column. directory: that of its file.
    """

    def __init__(self, data: DataImages, where: str, directory: Path, listed: Sequence[object]) -> None:
        self._data, self._where, self._directory, self._listed = data, where, directory, listed
        self._left, self._num_marks = iter(listed), 0
        self._digests: list[str] = []

    def again(self) -> "RowsImages":
        """Return the images of the row for a further text that shows all of them."""
        return RowsImages(self._data, self._where, self._directory, self._listed)

    def text(self, content: object, place: str) -> tuple[object, tuple[str, ...]]:
        """Return a turn's text, and the digests for which its marks stand; that of a list of parts, in OpenAI's form.

        Anything else is returned as it is. DataError names the place of an image that cannot be read.
        """
        num_before = len(self._digests)
        if isinstance(content, list):
            texts = [self._part(part, f"{place}[{i}]") for i, part in enumerate(content)]
            content = "".join(texts)
        elif isinstance(content, str):
            self._take(content.count(IMAGE_MARK))
        return content, tuple(self._digests[num_before:])

    def require_all(self) -> None:
        """Raise DataError unless each image has its mark and each mark its image."""
        if self._num_marks != len(self._listed):
            raise DataError(
                f"{self._where}: its texts have {self._num_marks} marks {IMAGE_MARK} for {len(self._listed)} images of "
                f"{self._data.form.image_key}; write one where each image stands"
            )

    def _part(self, part: object, place: str) -> str:
        kind = part.get("type") if isinstance(part, Mapping) else None
        # Parquet gives every part all fields of a struct.
        given = {key: each for key, each in part.items() if each is not None} if isinstance(part, Mapping) else {}
        if kind == "text" and isinstance(text := given.get("text"), str):
            self._take(text.count(IMAGE_MARK))
            return text
        if kind not in _KINDS:
            raise DataError(f"{place} is {part!s:.60}, expected a part of type text, image or image_url")
        value = next((given[key] for key in _PART_KEYS if key in given), None)
        if value is None:
            self._take(1)
        else:
            self._digests.append(self._data.add(_bytes_of(value, place, self._directory), place))
        return IMAGE_MARK

    def _take(self, count: int) -> None:
        """Read the next images of the column, as many as there are marks."""
        for _, value in zip(range(count), self._left, strict=False):
            place = f"{self._where}: {self._data.form.image_key}[{self._num_marks}]"
            self._digests.append(self._data.add(_bytes_of(value, place, self._directory), place))
        self._num_marks += count


def shows_image(part: object) -> bool:
    """Return whether a part of a turn or of a tool's result shows an image."""
    return isinstance(part, Mapping) and part.get("type") in _KINDS


def read_parts(parts: Sequence[Mapping[str, object]], read: Callable[[object], str]) -> tuple[str, tuple[str, ...]]:
    """Return the text of a reply's parts, with a mark for each image, and what `read` returns of the images.

    Other marks in the texts get a space, so that they stay text.
    """
    images = [
        read(next((part[key] for key in _PART_KEYS if part.get(key) is not None), None))
        for part in parts
        if shows_image(part)
    ]
    stays = f"< {IMAGE_MARK[1:]}" if images else IMAGE_MARK
    texts = (
        IMAGE_MARK if shows_image(part) else str(part.get("text", "")).replace(IMAGE_MARK, stays) for part in parts
    )
    return "".join(texts), tuple(images)


def _bytes_of(value: object, place: str, directory: Path | None) -> bytes:
    """Return the bytes of an image: of a struct, a data URL, base64, or the file of that name in a directory."""
    if isinstance(value, Mapping):
        value = next((value[key] for key in ("bytes", "url", "path", "data") if value.get(key) is not None), None)
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
    if not is_url and directory is not None and os.path.isfile(file := directory / value):
        return file.read_bytes()
    try:
        return base64.b64decode(text if is_url else value, validate=True)
    except (binascii.Error, ValueError) as error:
        beside = "" if directory is None else f" nor a file of {directory}"
        raise DataError(
            f"{place} is {value!r:.60}, neither a data URL nor base64{beside}; write one of these"
        ) from error
