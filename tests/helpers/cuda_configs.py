"""Build Megatron's configuration of a family as on GPUs, in a rank's process; Transformer Engine is pretended."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from megarl.config.schema import ActorConfig, LayoutConfig
from megarl.device.platform import CudaPlatform
from megarl.weights.families import read_model_spec
from tests.helpers.rank_pool import RankContext

RECOMPUTES = ("none", "selective", "full")


def rope_fusions(context: RankContext, path: str, layouts: Sequence[LayoutConfig]) -> list[bool]:
    """Whether Megatron fuses rotary embeddings, under each layout and way to recompute. It checks the rest itself."""
    from megarl.parallel.backend import prepare_megatron

    prepare_megatron()
    from megatron.core import utils
    from megatron.core.models.common.embeddings import rope_utils
    from packaging.version import Version

    from megarl.parallel import backend, model
    from megarl.parallel.layout import Layout

    spec = read_model_spec(path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(utils, "get_te_version", lambda: Version("2.11.0"))
        for name in ("fused_apply_rotary_pos_emb", "fused_apply_rotary_pos_emb_thd"):
            patch.setattr(rope_utils, name, object())
        patch.setitem(backend.BACKENDS, "cuda", backend.cuda_backend(transformer_engine=True))
        patch.setattr(model, "platform", CudaPlatform)
        configs = [
            model.transformer_config(
                spec,
                torch.bfloat16,
                ActorConfig(layout=layout, recompute=recompute),
                cast(Layout, SimpleNamespace(config=layout)),
            )
            for layout in layouts
            for recompute in RECOMPUTES
        ]
    return [config.apply_rope_fusion for config in configs]
