"""Load a rank's models (actor, reference, critic); wrap trained ones in Megatron's DDP and (distributed) AdamW."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import MegatronOptimizer, get_megatron_optimizer
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig

from megarl.config.schema import OptimizerConfig
from megarl.host.device.platform import platform
from megarl.parallel.head.policy import HeadRequest
from megarl.parallel.layout import Layout
from megarl.parallel.model import PackedModel, build_model
from megarl.parallel.moe.setup import prepare_experts
from megarl.types.messages import Head, RoleSpec
from megarl.weights.families import ModelSpec, read_model_spec


@dataclass(slots=True, kw_only=True)
class LoadedRole:
    """A role's model on this rank (actor, critic, ...). If it is frozen, `ddp` is empty and `optimizer` is None."""

    spec: RoleSpec
    model_spec: ModelSpec
    chunks: list[PackedModel]
    ddp: list[DistributedDataParallel]
    optimizer: MegatronOptimizer | None

    def expected_tensors(self) -> dict[str, tuple[int, ...]]:
        """Return name → full shape of the Hugging Face tensors of this model."""
        return self.model_spec.expected_tensors(scalar_head=self.spec.head is Head.SCALAR)

    def head_request(
        self,
        *,
        temperature: float,
        entropy_needs_grad: bool = False,
        token_local: bool = False,
        paired: bool = False,
    ) -> HeadRequest:
        """Build a request to the model's head from these arguments and the role's settings."""
        return HeadRequest(
            temperature=temperature,
            settings=self.spec.settings.head,
            fp32_logits=self.spec.model.fp32_head,
            entropy_needs_grad=entropy_needs_grad,
            token_local=token_local,
            paired=paired,
        )


def load_role(spec: RoleSpec, layout: Layout, *, batch_invariant: bool = False) -> LoadedRole:
    """Build a role's model chunks and read their weights. Unless the role is frozen, add DDP and an optimizer.

    batch_invariant: whether `make_batch_invariant` was called in this process.
    """
    model_spec = read_model_spec(spec.model.path)
    chunks = build_model(model_spec, spec.model, spec.settings, layout, spec.head, batch_invariant=batch_invariant)
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


class HeadAwareDdp(DistributedDataParallel):
    """Megatron's DDP for models whose log-prob head adds the gradient of its weight to `main_grad` itself.

    Autograd then has no gradient for an untied weight, without which Megatron refuses to overlap: a gradient that is
    not there might still come. Here it is final, since the head's part is added before autograd reaches the weight.
    """

    def _make_backward_post_hook(self, param: torch.nn.Parameter) -> Callable[..., None]:
        hook = super()._make_backward_post_hook(param)

        def count_as_ready(*_: Any) -> None:
            is_absent = param.grad is None
            if is_absent:
                # It takes the memory of one element, and is not added.
                param.grad = param.detach().new_zeros(()).expand_as(param)
                param.grad_added_to_main_grad = True  # type: ignore[attr-defined]
            hook()
            if is_absent:
                # In the next micro-batch the weight may have one, if it is also the embedding.
                param.grad_added_to_main_grad = False  # type: ignore[attr-defined]

        return count_as_ready


def wrap_ddp(chunks: Sequence[PackedModel], config: OptimizerConfig) -> list[DistributedDataParallel]:
    """Wrap a rank's model chunks in Megatron's DDP, which sums gradients over replicas in float32, not averages."""
    overlaps = platform().name == "cuda" if config.overlap_grad_reduce is None else config.overlap_grad_reduce
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, use_distributed_optimizer=config.distributed, overlap_grad_reduce=overlaps
    )
    wrapped: list[DistributedDataParallel] = [HeadAwareDdp(chunk.config, ddp_config, chunk) for chunk in chunks]

    # The loss is already divided by global denominators: no second division by tokens.
    chunks[0].config.finalize_model_grads_func = lambda models, num_tokens=None, **named: finalize_model_grads(
        models, None, **named
    )
    if overlaps:
        # Only the last micro-batch's gradients are complete.
        no_sync = [each.no_sync for each in wrapped]
        chunks[0].config.no_sync_func = no_sync if len(no_sync) > 1 else no_sync[0]
    return wrapped


def build_optimizer(chunks: Sequence[DistributedDataParallel], config: OptimizerConfig) -> MegatronOptimizer:
    """Build AdamW for wrapped chunks: no decay of norms and biases, float32 main parameters for bfloat16 models."""
    dtype = chunks[0].module.config.params_dtype
    optimizer = get_megatron_optimizer(
        MegatronOptimizerConfig(
            optimizer="adam",
            lr=config.lr,
            min_lr=config.lr * config.min_lr_frac,
            adam_beta1=config.betas[0],
            adam_beta2=config.betas[1],
            adam_eps=config.eps,
            weight_decay=config.weight_decay,
            clip_grad=config.clip_grad_norm,
            params_dtype=dtype,
            bf16=dtype is torch.bfloat16,
            use_distributed_optimizer=config.distributed,
        ),
        list(chunks),
    )
    for group in optimizer.param_groups:
        # Megatron leaves this to its own scheduler, which we do not use.
        group["weight_decay"] = config.weight_decay * group["wd_mult"]
    return optimizer
