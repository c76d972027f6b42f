"""Let processors of images import torchvision beside torch's build for CPUs."""

import importlib
import sys
from importlib.util import find_spec
from pathlib import Path

from megarl.errors import ConfigError

# Where `make install` puts the Python part of torchvision, which is on no import path.
FOLDER = "images"


def import_torchvision() -> None:
    """Import torchvision, or its Python part alone, in which it resizes images as it does everywhere.

    Raises ConfigError if it is not installed. Processors of most models are built on it, and Pillow resizes otherwise:
    trainer and engines must have the same.
    """
    if "torchvision" in sys.modules:
        return
    if "transformers" in sys.modules:
        raise RuntimeError("torchvision is to be imported before transformers, which looks for it once")
    if find_spec("torchvision") is None:
        folder = Path(sys.prefix) / FOLDER
        if not (folder / "torchvision").is_dir():
            raise ConfigError(f"reading images needs torchvision, which is not in {folder}; run `make install`")
        sys.path += [str(Path(__file__).parent / "beside"), str(folder)]
    importlib.import_module("torchvision")
