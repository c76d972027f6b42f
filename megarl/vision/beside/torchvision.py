"""Stand for torchvision where its Python part alone is installed: declare what its compiled part would, and run it.

This folder is on the import path before that part, also in processes that one with torchvision starts.
"""

import sys
from pathlib import Path

import torch

_PART = Path(sys.prefix) / "images" / "torchvision"
# Its Python part adds to these declarations, which last as long as the object.
_LIBRARY = torch.library.Library("torchvision", "DEF")
for _name in ("nms", "qnms"):
    _LIBRARY.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
__path__ = [str(_PART)]
__package__ = "torchvision"
assert __spec__ is not None
__spec__.submodule_search_locations = __path__
exec(compile((_PART / "__init__.py").read_text(encoding="utf-8"), str(_PART / "__init__.py"), "exec"))
