"""TRL's trainers on preference pairs as installed, with given numbers in place of a model.

The first half of a batch's rows are chosen responses, the second half the rejected ones of the same pairs. A row is one
token of prompt and the response's tokens.
"""

from collections import defaultdict
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor
from trl.experimental.orpo.orpo_trainer import ORPOTrainer
from trl.trainer.dpo_trainer import DPOTrainer
from trl.trainer.kto_trainer import KTOTrainer

from tests.conformance.batches import Batch

# Tokens of responses, and of the responses that KTO estimates its KL with.
RESPONSE, OTHER = 1, 2


def padded(values: Tensor) -> Tensor:
    """[B, 1 + T] with a first column for the prompt."""
    return torch.cat([torch.zeros_like(values[:, :1]), values], dim=1)


@dataclass(kw_only=True)
class Model:
    """What a policy says of responses, `logprobs` [B, T], and of KTO's other responses."""

    logprobs: Tensor
    others: Tensor | None = None
    training: bool = True

    def __call__(self, *, input_ids: Tensor, labels: Tensor, **options: Any) -> SimpleNamespace:
        found = self.others if int(input_ids.max()) == OTHER else self.logprobs
        assert found is not None
        zeros = torch.zeros_like(found)
        return SimpleNamespace(
            log_probs=torch.where(labels[:, 1:] == -100, zeros, found),
            entropy=zeros,
            mean_logits=zeros,
            is_top1=zeros.bool(),
        )


class _WithoutModel:
    """A trainer with the settings that its loss reads."""

    def __init__(self, batch: Batch, **settings: Any) -> None:
        self.batch = batch
        defaults = {
            "accelerator": Accelerator(cpu=True),
            "model": Model(logprobs=batch.logprobs),
            "args": SimpleNamespace(),
            "precompute_ref_logps": True,
            "aux_loss_enabled": False,
            "_metrics": defaultdict(lambda: defaultdict(list)),
            "_total_train_tokens": 0,
            "_tp_size": 1,
        }
        for name, value in (defaults | settings).items():
            setattr(self, name, value)

    def metrics(self) -> dict[str, float]:
        """What the last loss logged."""
        return {name: values[-1] for name, values in self._metrics["train"].items()}

    def _inputs(self) -> dict[str, Tensor]:
        mask = padded(self.batch.mask.long())
        attended = mask.clone()
        attended[:, 0] = 1
        return {"input_ids": mask * RESPONSE, "attention_mask": attended, "completion_mask": mask}

    def _reference(self) -> Tensor:
        """[B] log-probs of the responses under the reference."""
        return (self.batch.ref_logprobs * self.batch.mask).sum(dim=1)


class Dpo(_WithoutModel, DPOTrainer):
    """DPO and IPO, by `loss_types`."""

    def __init__(self, batch: Batch, **settings: Any) -> None:
        fixed = {
            "ld_alpha": None,
            "f_divergence_type": "reverse_kl",
            "loss_weights": [1.0],
            "label_smoothing": 0.0,
            "use_weighting": False,
        }
        super().__init__(batch, **fixed, **settings)

    def loss(self, logprobs: Tensor) -> Tensor:
        """The loss of the batch as a function of what the policy says, [B, T]."""
        chosen, rejected = self._reference().chunk(2)
        inputs = {**self._inputs(), "ref_chosen_logps": chosen, "ref_rejected_logps": rejected}
        return self._compute_loss(Model(logprobs=logprobs), inputs, return_outputs=False)


class Kto(_WithoutModel, KTOTrainer):
    """KTO. `others`: what the policy and the reference say of other responses to the prompts, [2, B, T]."""

    def __init__(self, batch: Batch, others: Tensor, **settings: Any) -> None:
        super().__init__(batch, calculate_KL=True, loss_type="kto", others=others, **settings)

    def loss(self, logprobs: Tensor) -> Tensor:
        """The loss of the batch as a function of what the policy says, [B, T]."""
        inputs, rows, mask = self._inputs(), len(logprobs), self.batch.mask
        inputs |= {
            "label": torch.arange(rows) < rows // 2,
            "KL_input_ids": inputs["completion_mask"] * OTHER,
            "KL_attention_mask": inputs["attention_mask"],
            "KL_completion_mask": inputs["completion_mask"],
            "ref_logps": self._reference(),
            "ref_KL_logps": (self.others[1] * mask).sum(dim=1),
        }
        return self._compute_loss(Model(logprobs=logprobs, others=self.others[0]), inputs, return_outputs=False)


class Orpo(ORPOTrainer):
    """ORPO, on whole logits."""

    def __init__(self, *, beta: float) -> None:
        self.accelerator, self.beta = Accelerator(cpu=True), beta
        self.is_encoder_decoder, self.aux_loss_enabled, self.padding_value = False, False, 0

    def loss(self, logits: Tensor, token_ids: Tensor, attended: Tensor, responses: Tensor) -> Tensor:
        """The loss of rows [B, 1 + T] with these tokens; both masks are bool, `responses` without the prompt."""

        def model(*args: Any, **options: Any) -> SimpleNamespace:
            return SimpleNamespace(logits=logits)

        parts = {
            "input_ids": token_ids,
            "attention_mask": attended.long(),
            "labels": token_ids.masked_fill(~responses, -100),
        }
        batch = {
            f"{side}_{name}": half
            for name, values in parts.items()
            for side, half in zip(("chosen", "rejected"), values.chunk(2), strict=True)
        }
        return self.get_batch_loss_metrics(model, batch)[0]
