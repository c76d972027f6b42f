"""Read the images of a pack with a vision tower: transformers' own modules, whole on each rank of the first stage.

Every rank of tensor parallelism computes the same features and gets the whole gradient of each, so the gradients of the
tower need no sum over these ranks. Ranks of data and context parallelism get those of their own tokens, which DDP sums.
Features stand at the places that rows recorded, never where a token's id is that of a placeholder: a policy may write
such ids.
"""

import inspect
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from megatron.core.tensor_parallel import scatter_to_sequence_parallel_region
from torch.distributed import ProcessGroup

from megarl.errors import ConfigError, DataError
from megarl.parallel.pack_images import PackImage
from megarl.parallel.packing import Pack
from megarl.vision.reader import ImageReader
from megarl.vision.torchvision_part import import_torchvision
from megarl.weights.safetensors_headers import model_files
from megarl.weights.safetensors_map import map_model
from megarl.weights.towers import MRope, Tower

# Pixels that a tower reads at once: some compare each patch with those of all images there.
_BATCH_BYTES = 4 << 20


class VisionTower(torch.nn.Module):
    """The parts of transformers' model but its language model. Its weights are those of the model's files.

    They are frozen, but for those that `tower` says are trained.
    """

    def __init__(self, model: Path, tower: Tower, reader: ImageReader, dtype: torch.dtype) -> None:
        super().__init__()
        import_torchvision()
        import transformers

        config = transformers.AutoConfig.from_pretrained(model, local_files_only=True, trust_remote_code=False)
        # Its language model is not built: it has no layers, and one token.
        text = config.text_config
        text.num_hidden_layers, text.vocab_size, text.pad_token_id, text.layer_types = 0, 1, None, []
        whole = transformers.AutoModel.from_config(config, attn_implementation="sdpa", dtype=dtype)
        del whole.language_model
        self.model, self.reader = whole, reader
        tensors = map_model(model_files(model))
        try:
            whole.load_state_dict({held: tensors[name] for name, held in tower.names.items()})
        except RuntimeError as error:
            reason = " ".join(str(error).split())
            raise ConfigError(f"{model}: its vision tower is not that of its config.json: {reason}") from error
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(f"tower.{name}" in tower.trained_names)
        asked = inspect.signature(whole.get_image_features).parameters
        self.input_names = frozenset(asked)

    @property
    def num_added(self) -> int:
        """Return after how many of the first layers features are added again (deepstack)."""
        return len(getattr(self.model.config.vision_config, "deepstack_visual_indexes", None) or ())

    def forward(self, images: Sequence[PackImage]) -> list[torch.Tensor]:
        """Return the features [F, H] of images at their tokens, one image after the other; after these, those that are
        added after each of the first layers.

        Raises DataError, which names the row, for an image that this process reads otherwise than who made the row.
        """
        given = list[Mapping[str, torch.Tensor]]()
        for image in images:
            read = self.reader.read(image.digest)
            if (sum(read.is_feature), read.grid) != (image.num_features, image.grid):
                raise DataError(
                    f"{image.whose}: image {image.digest} has {sum(read.is_feature)} features here, in the form "
                    f"{read.grid}, expected {image.num_features}, {image.grid}; have the same files of the model and "
                    "the same transformers on all hosts"
                )
            given.append({name: each for name, each in read.tensors.items() if name in self.input_names})
        found = []
        for start, end in _batches(given):
            batch, device = images[start:end], images[start].tokens.device
            inputs = {name: torch.cat([each[name] for each in given[start:end]]).to(device) for name in given[start]}
            answer = self.model.get_image_features(**inputs, return_dict=True)
            kinds = (answer.pooler_output, *(getattr(answer, "deepstack_features", None) or ()))
            # There is one tensor for each image, or for each part of one.
            split = (torch.cat([*each]).flatten(0, -2).split([each.num_features for each in batch]) for each in kinds)
            found += [[part[image.features] for part in parts] for image, *parts in zip(batch, *split, strict=True)]
        return [torch.cat(parts) for parts in zip(*found, strict=True)]


def _batches(given: Sequence[Mapping[str, torch.Tensor]]) -> Iterator[tuple[int, int]]:
    """Yield the bounds of images that follow each other and are read together: small ones, of one form."""
    start, size = 0, 0
    for i, each in enumerate(given):
        own = sum(tensor.nbytes for tensor in each.values())
        alike = all(tensor.shape[1:] == given[start][name].shape[1:] for name, tensor in each.items())
        if i > start and (not alike or size + own > _BATCH_BYTES):
            yield start, i
            start, size = i, 0
        size += own
    yield start, len(given)


class _ReadFeatures(torch.autograd.Function):
    """Pass embeddings on, and give a tower its gradients when that of the first layer's input is known.

    Layers that are computed again in backward read leaves: through these no gradient reaches the tower's graph, which
    backward would free too early. Every parameter gets a gradient, also where a pack has no image: DDP counts them.
    """

    @staticmethod
    def forward(
        ctx: Any, embeddings: torch.Tensor, leaves: Sequence[torch.Tensor], *rest: torch.Tensor
    ) -> torch.Tensor:
        ctx.leaves, ctx.parameters = leaves, rest[len(leaves) :]
        return embeddings.view_as(embeddings)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        zeros = (each.new_zeros(()).expand_as(each) for each in ctx.parameters)
        return gradients[0], None, *(leaf.grad for leaf in ctx.leaves), *zeros


def embed_pack(
    embedding: torch.nn.Module, tower: VisionTower, pack: Pack, sequence_group: ProcessGroup | None
) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """Return the first layer's input, with features in the place of embeddings, and what is added after each of the
    first layers.

    sequence_group: the ranks among which sequence parallelism divides both; None: it is off.
    """
    embeddings = embedding(input_ids=pack.input_ids, position_ids=pack.position_ids)
    added = list[torch.Tensor]()
    if pack.images:
        tokens = torch.cat([image.tokens for image in pack.images])
        # [T, 1, H]
        features, *more = (each.to(embeddings.dtype)[:, None] for each in tower(pack.images))
        embeddings = embeddings.index_copy(0, tokens, features)
        added = [torch.zeros_like(embeddings).index_copy(0, tokens, each) for each in more]
    if sequence_group is not None:
        embeddings, *added = (
            scatter_to_sequence_parallel_region(each, group=sequence_group) for each in (embeddings, *added)
        )
    trained = [each for each in tower.parameters() if each.requires_grad]
    if not (trained and torch.is_grad_enabled()):
        return embeddings, tuple(added)
    leaves = [each.detach().requires_grad_() for each in added]
    return _ReadFeatures.apply(embeddings, leaves, *added, *trained), tuple(leaves)


def add_features_after(layers: Sequence[torch.nn.Module], count: int) -> None:
    """Let each of the first `count` layers add its image features to its output, in recomputation too.

    Raises ConfigError if there are fewer layers.
    """
    if count > len(layers):
        raise ConfigError(
            f"actor.layout: the first pipeline stage has {len(layers)} layers, but the model reads images after "
            f"each of its first {count}; give the first stage as many (first_stage_layers), or use fewer stages"
        )
    for number, layer in enumerate(layers[:count]):

        def add(_: Any, __: Any, named: Mapping[str, Any], out: Any, number: int = number) -> Any:
            pack = named["packed_seq_params"].pack
            return (out[0] + pack.added[number], *out[1:]) if pack.added else out

        layer.register_forward_hook(add, with_kwargs=True)


def mrope_angles(inv_freq: torch.Tensor, positions: torch.Tensor, mrope: MRope) -> torch.Tensor:
    """Return the angles [T, 1, 1, d] of tokens at positions [3, T]: each frequency turns by that of its axis."""
    axes = torch.tensor(mrope.axes(len(inv_freq)), device=positions.device)
    angles = positions[axes].t().float() * inv_freq
    return torch.cat([angles, angles], -1)[:, None, None]
