"""TRL's trainers, their advantages and losses as installed, with given numbers in place of a model.

Their formulas are inside methods that also generate and run models. The classes here replace just that: what is
sampled, what it is rewarded with, and what a model says of it are those of a batch; all else is TRL's.
"""

from collections import defaultdict
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor
from trl.trainer.grpo_trainer import GRPOTrainer
from trl.trainer.rloo_trainer import RLOOTrainer

from tests.conformance.batches import HORIZON_TOKENS, Batch


@dataclass(kw_only=True)
class Answers:
    """What a model says of a batch, [B, T] each."""

    logprobs: Tensor
    entropy: Tensor | None = None
    training: bool = True
    is_gradient_checkpointing: bool = False


class _WithoutModel:
    """Rows of `batch` must be in the order of their groups, of equal size."""

    def __init__(self, batch: Batch, **settings: Any) -> None:
        self.batch = batch
        group_size = batch.uids.count(batch.uids[0])
        defaults = {
            "accelerator": Accelerator(cpu=True),
            "args": _arguments(batch),
            "model": Answers(logprobs=batch.old_logprobs),
            "ref_model": Answers(logprobs=batch.ref_logprobs),
            "num_generations": group_size,
            "reward_weights": torch.ones(1, dtype=torch.float64),
            "reward_funcs": [None],
            "reward_func_names": ["reward"],
            "multi_objective_aggregation": "sum_then_normalize",
            "environment_factories": None,
            "environments": None,
            "tools": None,
            "_tokenizer": SimpleNamespace(pad_token_id=0),
            "pad_to_multiple_of": None,
            "mask_truncated_completions": False,
            "num_iterations": 1,
            "use_vllm": False,
            "vllm_importance_sampling_correction": False,
            "log_multimodal": False,
            "reward_clip_range": None,
            "normalize_advantages": False,
            "beta": 0.0,
            "aux_loss_enabled": False,
            "top_entropy_quantile": 1.0,
            "off_policy_mask_threshold": None,
            "importance_sampling_level": "token",
            "current_gradient_accumulation_steps": 1,
            "max_completion_length": HORIZON_TOKENS,
            "use_adaptive_entropy": False,
            "_entropy_bonus_enabled": False,
            "_metrics": defaultdict(lambda: defaultdict(list)),
            "_logs": {"prompt": [], "completion": [], "rewards": {"reward": []}, "advantages": [], "extra": {}},
            "_pending_extra_logs": {},
            "_pending_metrics": {},
        }
        for name, value in (defaults | settings).items():
            setattr(self, name, value)

    def _get_per_token_logps_and_entropies(self, model: Answers, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        return model.logprobs, model.entropy, None

    def _calculate_rewards(self, *args: Any) -> Tensor:
        return self.batch.rewards[:, None].clone()

    def _completion_ids(self) -> list[list[int]]:
        return [[1] * int(length) for length in self.batch.mask.sum(dim=-1)]

    def scored(self) -> dict[str, Tensor]:
        """What TRL hands to its loss: advantages [B] among others."""
        return self._generate_and_score_completions([{"prompt": uid} for uid in self.batch.uids])


def _arguments(batch: Batch) -> SimpleNamespace:
    return SimpleNamespace(
        steps_per_generation=1,
        gradient_accumulation_steps=1,
        gradient_checkpointing_kwargs=None,
        per_device_train_batch_size=len(batch.uids),
        use_bias_correction_kl=False,
        delta=None,
        report_to=[],
    )


class Grpo(_WithoutModel, GRPOTrainer):
    """GRPO and its relatives."""

    def _generate(self, prompts: list[str]) -> tuple[Any, ...]:
        ids = self._completion_ids()
        sampled = [row[: len(one)].tolist() for row, one in zip(self.batch.rollout_logprobs, ids, strict=True)]
        return [[1]] * len(ids), ids, None, [""] * len(ids), sampled, {}, None, None

    def loss(self, logprobs: Tensor, entropy: Tensor | None = None) -> Tensor:
        """The loss of the batch as a function of what the current policy says, [B, T] each."""
        batch = self.batch
        rows = len(batch.uids)
        inputs = {
            "prompt_ids": torch.ones(rows, 1, dtype=torch.long),
            "prompt_mask": torch.ones(rows, 1, dtype=torch.long),
            "completion_ids": torch.ones_like(batch.mask, dtype=torch.long),
            "completion_mask": batch.mask.long(),
            "advantages": batch.advantages,
            "old_per_token_logps": batch.old_logprobs,
            "ref_per_token_logps": batch.ref_logprobs,
            "num_items_in_batch": batch.mask.sum(),
        }
        entropy = torch.zeros_like(logprobs) if entropy is None else entropy
        return self._compute_loss(Answers(logprobs=logprobs, entropy=entropy), inputs)


class Rloo(_WithoutModel, RLOOTrainer):
    """RLOO."""

    def _generate(self, prompts: list[str]) -> tuple[Any, ...]:
        ids = self._completion_ids()
        return [[1]] * len(ids), ids, [""] * len(ids)
