"""Keep images by what they contain, so that each travels and lies on the disk once."""

import hashlib
from dataclasses import dataclass
from pathlib import Path

from megarl.errors import ConfigError
from megarl.host.writing import replacing


@dataclass(frozen=True, slots=True)
class ImageStore:
    """A directory with the bytes of a run's images, each in a file that is named by their digest (SHA-256)."""

    directory: Path

    def put(self, image: bytes) -> str:
        """Store an image, unless it is there, and return its digest."""
        digest = hashlib.sha256(image).hexdigest()
        file = self.directory / digest
        if not file.exists():
            self.directory.mkdir(parents=True, exist_ok=True)
            with replacing(file) as partial:
                partial.write_bytes(image)
        return digest

    def read(self, digest: str) -> bytes:
        """Return the image of a digest. Raise ConfigError if it is absent or no longer what it was."""
        file = self.directory / digest
        if not file.is_file():
            raise ConfigError(f"image {file} does not exist; restore the directory {self.directory.name} of the run")
        image = file.read_bytes()
        if (found := hashlib.sha256(image).hexdigest()) != digest:
            raise ConfigError(f"image {file} has the digest {found}, expected that of its name; restore the file")
        return image
