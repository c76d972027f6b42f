"""Merge adapters into the weights that they belong to, a part of a tensor at a time."""

import operator
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import replace

import torch

from megarl.config.lora import LoraConfig
from megarl.weights.adapters import adapter_spec, matrices_of, target_of
from megarl.weights.boxes import Box, box_of, intersection, slices_of
from megarl.weights.families import ModelSpec
from megarl.weights.slices import Slice, flat_views, is_turned


class Merger:
    """Computes W + s·B·A of any part that this rank holds of a tensor W, from its slices of A and B, in float32.

    Tensors are named as engines take them: those of all experts of a layer are one for each expert.

    The weights themselves stay as they are: to add and subtract an update in place would change them a little each
    time.
    """

    def __init__(self, base: ModelSpec, config: LoraConfig, slices: Iterable[Slice]) -> None:
        """Take a rank's slices of all tensors of a model's adapters."""
        found = defaultdict[str, dict[Box, torch.Tensor]](dict)
        # A scalar head is among the adapters' tensors.
        shapes = adapter_spec(base, config).expected_tensors(scalar_head=True)
        for part in slices:
            found[part.tensor].update(flat_views(box_of(part.index, shapes[part.tensor]), part.view))
        self._views = {name: sorted(boxes.items(), key=operator.itemgetter(0)) for name, boxes in found.items()}
        self._scale = config.alpha / config.rank
        # By tensor whose axes are in reverse: the matrices whose outputs take turns on its last one.
        self._turned = {
            placed.name(tensor.sent_name): [placed.name(matrix.name) for matrix in matrices_of(placed.rule)]
            for placed in base.rules()
            if is_turned(placed.rule.partition) and target_of(placed.rule) in config.targets
            for tensor in placed.rule.tensors
        }
        self._shapes = base.expected_tensors(by_expert=True) | base.expected_tensors(by_expert=True, scalar_head=True)

    @torch.no_grad()
    def merged(self, name: str, box: Box, view: torch.Tensor) -> torch.Tensor:
        """Return the merged part `box` of a tensor in the shape and type of `view`, its part without adapters."""
        if (modules := self._turned.get(name)) is not None:
            inputs, (start, end) = box
            outputs = (start // len(modules), end // len(modules))
            update = torch.stack([self._update(module, outputs, inputs).T for module in modules], dim=-1)
        elif f"{(module := name.removesuffix('.weight'))}.lora_B.weight" in self._views:
            update = self._update(module, *box)
        else:
            return view
        return (view.float() + self._scale * update.reshape(view.shape)).to(view.dtype)

    def slices(self, slices: Iterable[Slice], by_expert: Iterable[Slice]) -> Iterator[Slice]:
        """Yield slices of weights with merged copies in place of views, one at a time.

        by_expert: the same slices, named as engines take them.
        """
        for part, sent in zip(slices, by_expert, strict=True):
            view = self.merged(sent.tensor, box_of(sent.index, self._shapes[sent.tensor]), sent.view)
            yield replace(part, view=view.mT if part.is_transposed else view)

    def _update(self, module: str, outputs: tuple[int, int], inputs: tuple[int, int]) -> torch.Tensor:
        b = self._cut(f"{module}.lora_B.weight", outputs, axis=0)
        return b @ self._cut(f"{module}.lora_A.weight", inputs, axis=1)

    def _cut(self, name: str, wanted: tuple[int, int], *, axis: int) -> torch.Tensor:
        """Return the rows (axis 0) or columns (axis 1) `wanted` of an adapter's tensor in float32."""
        parts = []
        for box, view in self._views[name]:
            within = (wanted, box[1]) if axis == 0 else (box[0], wanted)
            if (common := intersection(box, within)) is not None:
                parts.append(view[slices_of(common, box)].float())
        return torch.cat(parts, dim=axis)
