"""Describe the vision tower of a model by the headers of its files, with no table of its tensors."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megarl.config.vision import TowerPart
from megarl.errors import ConfigError
from megarl.weights.rules import TOWER, Family, HFTensor, Partition, WeightRule
from megarl.weights.safetensors_headers import model_files, read_header

# The modules that turn a tower's features into what the language model reads.
_PROJECTORS = frozenset({"merger", "deepstack_merger_list", "downsample", "multi_modal_projector"})


def is_trained(name: str, part: TowerPart) -> bool:
    """Return whether a parameter of a tower is trained, given its name in a file, in transformers or in vLLM.

    >>> is_trained("visual.merger.norm.weight", "projector"), is_trained("visual.blocks.0.norm1.weight", "projector")
    (True, False)
    """
    return part == "all" or (part == "projector" and not _PROJECTORS.isdisjoint(name.split(".")))


@dataclass(frozen=True, slots=True, kw_only=True)
class MRope:
    """Positions with three axes (time, row, column), among which the frequencies of rope are divided.

    sections: how many frequencies each axis has. interleaved: rows and columns take every third one, until they have
    theirs; otherwise the axes' frequencies lie one after the other.
    """

    sections: tuple[int, int, int]
    interleaved: bool

    def axes(self, num_frequencies: int) -> list[int]:
        """Return the axis that each frequency belongs to.

        >>> MRope(sections=(2, 1, 1), interleaved=True).axes(4)
        [0, 1, 2, 0]
        >>> MRope(sections=(2, 1, 1), interleaved=False).axes(4)
        [0, 0, 1, 2]
        """
        if not self.interleaved:
            return [axis for axis, count in enumerate(self.sections) for _ in range(count)]
        return [i % 3 if i < 3 * self.sections[i % 3] else 0 for i in range(num_frequencies)]


@dataclass(frozen=True, slots=True, kw_only=True)
class TowerWork:
    """The work of a tower on an image, of which it reads `patches` patches for each `features` features.

    per_patch, per_feature: multiplications of weights for each, the latter the projector's. kept_per_patch,
    kept_per_feature: elements that go into and come out of these products. windows: of each layer, how many patches a
    patch attends to at most; None: all. width: that of a patch's hidden state.
    """

    patches: int
    features: int
    per_patch: int
    per_feature: int
    kept_per_patch: int
    kept_per_feature: int
    windows: tuple[int | None, ...]
    width: int

    def flops(self, num_features: int, part: TowerPart = "none") -> int:
        """Count the FLOPs of an image's features, and of the backward pass of what is trained."""
        num, factors = self._num_patches(num_features), {"none": (1, 1), "projector": (1, 3), "all": (3, 3)}[part]
        attended = num * sum(num if each is None else min(each, num) for each in self.windows)
        inner = 2 * num * self.per_patch + 4 * self.width * attended
        return factors[0] * inner + factors[1] * 2 * num_features * self.per_feature

    def num_kept(self, num_features: int, part: TowerPart, num_passes: int = 1) -> int:
        """Count the elements that so many passes, each over images with so many features, keep for backward; what is
        not trained keeps none, and has those of one layer at a time.
        """
        per_layer = self.kept_per_patch // max(1, len(self.windows))
        inner = num_passes * self.kept_per_patch if part == "all" else per_layer
        outer = self.kept_per_feature * (1 if part == "none" else num_passes)
        return self._num_patches(num_features) * inner + num_features * outer

    def _num_patches(self, num_features: int) -> int:
        return self.patches * num_features // self.features


@dataclass(frozen=True, slots=True, kw_only=True)
class Tower:
    """The vision tower of a model.

    part: what is trained. rules: those of its parameters, whole on each rank; trained: those of the part.
    names: by the name of each of its tensors in the model's files, that of the parameter in transformers' model.
    """

    part: TowerPart
    work: TowerWork
    rules: tuple[WeightRule, ...]
    trained: tuple[WeightRule, ...]
    names: Mapping[str, str]
    mrope: MRope | None

    @property
    def trained_names(self) -> frozenset[str]:
        """Return the names in megarl of the parameters that are trained."""
        return frozenset(rule.names[0] for rule in self.trained)


def read_tower(directory: Path, family: Family, config: Mapping[str, Any], part: TowerPart) -> Tower:
    """Describe the tower in a model's directory. Raise ConfigError if images are not supported for it.

    config: its config.json, with the settings of its language model on top. part: what is trained of the tower.
    """
    if not family.vision:
        raise ConfigError(f"{directory}: a model of the family {family.name} has no vision tower to read images with")
    names, rules, shapes = {}, [], dict[str, tuple[int, ...]]()
    for file in model_files(directory):
        for name, header in sorted(read_header(file).items()):
            if (written := next((each for each in family.vision if name.startswith(each)), None)) is not None:
                names[name] = family.vision[written] + name.removeprefix(written)
                shapes[name] = header.shape
                tensor = HFTensor(name, tuple(map(str, header.shape)))
                partition = Partition.REPLICATED
                rules.append(WeightRule(names=(TOWER + names[name],), partition=partition, tensors=(tensor,)))
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    mrope = None
    if "mrope_section" in family.ignored_rope:
        sections = rope.get("mrope_section")
        if not isinstance(sections, list) or len(sections) != 3:
            raise ConfigError(
                f"{directory / 'config.json'}: rope key mrope_section: got {sections!r}, expected three numbers; use "
                "the config.json the model was published with"
            )
        mrope = MRope(sections=tuple(sections), interleaved=family.interleaves_mrope)
    trained = tuple(rule for rule in rules if is_trained(rule.names[0], part))
    if part != "none" and not trained:
        raise ConfigError(
            f"actor.vision.train: got {part}, but the files in {directory} have no such part of a vision tower; use "
            "those that the model was published with"
        )
    return Tower(
        part=part, work=_work_of(shapes, config), rules=tuple(rules), trained=trained, names=names, mrope=mrope
    )


def _work_of(shapes: Mapping[str, tuple[int, ...]], config: Mapping[str, Any]) -> TowerWork:
    """Return what a tower with weights of these shapes computes; biases and norms take no time."""
    # Embeddings of positions, and of what stands before the patches, are looked up.
    looked_up = re.compile(r"(^|\.)(pos\w*|\w+_token)(\.\w+)?$")
    products = {name: each for name, each in shapes.items() if len(each) > 1 and not looked_up.search(name)}
    of_patches, of_features = (
        {name: each for name, each in products.items() if is_trained(name, "projector") == of_feature}
        for of_feature in (False, True)
    )
    # Patches of pixels are read by a convolution.
    width, *_, patch_size = max(of_patches.values(), key=len)
    layers = sorted({int(part) for name in of_patches for part in name.split(".") if part.isdigit()})
    vision = config.get("vision_config") or {}
    whole, window = vision.get("fullatt_block_indexes"), vision.get("window_size", 0)
    patches, features = (vision.get("spatial_merge_size") or config.get("spatial_merge_size", 2)) ** 2, 1
    if (per_tile := config.get("mm_tokens_per_image") or config.get("image_seq_length")) is not None:
        # Images are read in squares of one size.
        size = vision["image_size"]
        side = (size if isinstance(size, int) else min(size)) // patch_size
        patches, features = side**2 + any(name.endswith("cls_token") for name in shapes), per_tile
    return TowerWork(
        patches=patches,
        features=features,
        per_patch=sum(map(math.prod, of_patches.values())),
        per_feature=sum(map(math.prod, of_features.values())),
        kept_per_patch=sum(each[0] + math.prod(each[1:]) for each in of_patches.values()),
        kept_per_feature=sum(each[0] + math.prod(each[1:]) for each in of_features.values()),
        windows=tuple(
            (patches if features > 1 else None) if whole is None or i in whole else (window // patch_size) ** 2
            for i in layers
        ),
        width=width,
    )
