"""Merge adapters into the weights that they belong to, a part of a tensor at a time."""

import operator
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

import torch

from megarl.weights.boxes import Box, box_of, intersection, slices_of
from megarl.weights.slices import Slice, flat_views


class Merger:
    """Computes W + s·B·A of any part that this rank holds of a tensor W, from its slices of A and B, in float32.

    The weights themselves stay as they are: to add and subtract an update in place would change them a little each
    time.
    """

    def __init__(self, slices: Iterable[Slice], shapes: Mapping[str, tuple[int, ...]], scale: float) -> None:
        """Take a rank's slices of all adapter tensors, which have these full shapes, and s = alpha / rank."""
        found = defaultdict[str, dict[Box, torch.Tensor]](dict)
        for part in slices:
            found[part.tensor].update(flat_views(box_of(part.index, shapes[part.tensor]), part.view))
        self._views = {name: sorted(boxes.items(), key=operator.itemgetter(0)) for name, boxes in found.items()}
        self._scale = scale

    @torch.no_grad()
    def merged(self, name: str, box: Box, view: torch.Tensor) -> torch.Tensor:
        """Return the merged part `box` of a tensor in the shape and type of `view`, its part without adapters."""
        module = name.removesuffix(".weight")
        if f"{module}.lora_B.weight" not in self._views:
            return view
        rows, columns = box
        low = self._cut(f"{module}.lora_A.weight", columns, axis=1)
        update = self._cut(f"{module}.lora_B.weight", rows, axis=0) @ low
        return (view.float() + self._scale * update.view(view.shape)).to(view.dtype)

    def slices(self, slices: Iterable[Slice], shapes: Mapping[str, tuple[int, ...]]) -> Iterator[Slice]:
        """Yield slices of weights with merged copies in place of views, one at a time."""
        for part in slices:
            view = self.merged(part.tensor, box_of(part.index, shapes[part.tensor]), part.view)
            yield replace(part, view=view)

    def _cut(self, name: str, wanted: tuple[int, int], *, axis: int) -> torch.Tensor:
        """Return the rows (axis 0) or columns (axis 1) `wanted` of an adapter's tensor in float32."""
        parts = []
        for box, view in self._views[name]:
            within = (wanted, box[1]) if axis == 0 else (box[0], wanted)
            if (common := intersection(box, within)) is not None:
                parts.append(view[slices_of(common, box)].float())
        return torch.cat(parts, dim=axis)
