"""The models a rank hosts: actor, reference, critic, each with what training it needs."""

from dataclasses import dataclass

from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer

from megarl.parallel.head.policy import HeadRequest
from megarl.parallel.layout import Layout
from megarl.parallel.model import PackedModel, build_model
from megarl.parallel.moe.setup import prepare_experts
from megarl.parallel.optimizer import build_optimizer, wrap_ddp
from megarl.types.messages import Head, RoleSpec
from megarl.weights.families import ModelSpec, read_model_spec


@dataclass(slots=True, kw_only=True)
class LoadedRole:
    """A role on this rank. `ddp` and `optimizer` are empty and None for a frozen one."""

    spec: RoleSpec
    model_spec: ModelSpec
    chunks: list[PackedModel]
    ddp: list[DistributedDataParallel]
    optimizer: MegatronOptimizer | None

    def expected_tensors(self) -> dict[str, tuple[int, ...]]:
        """The Hugging Face tensors of this model."""
        return self.model_spec.expected_tensors(scalar_head=self.spec.head is Head.SCALAR)

    def head_request(
        self,
        *,
        temperature: float,
        entropy_needs_grad: bool = False,
        token_local: bool = False,
        paired: bool = False,
    ) -> HeadRequest:
        """How this role's head is to score."""
        return HeadRequest(
            temperature=temperature,
            settings=self.spec.settings.head,
            fp32_logits=self.spec.model.fp32_head,
            entropy_needs_grad=entropy_needs_grad,
            token_local=token_local,
            paired=paired,
        )


def load_role(spec: RoleSpec, layout: Layout) -> LoadedRole:
    """Build a role's model chunks, read their weights, and wrap them for training unless frozen."""
    model_spec = read_model_spec(spec.model.path)
    chunks = build_model(model_spec, spec.model, spec.settings, layout, spec.head)
    for chunk in chunks:
        chunk.replays_routing = spec.replays_routing
    if not spec.trainable:
        for chunk in chunks:
            chunk.requires_grad_(False)
        return LoadedRole(spec=spec, model_spec=model_spec, chunks=chunks, ddp=[], optimizer=None)
    prepare_experts(chunks, spec.settings.moe)
    ddp = wrap_ddp(chunks, spec.settings.optimizer)
    optimizer = build_optimizer(ddp, spec.settings.optimizer)
    return LoadedRole(spec=spec, model_spec=model_spec, chunks=chunks, ddp=ddp, optimizer=optimizer)
