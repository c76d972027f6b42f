"""Define the section `algo.distill`: learning the distribution of a teacher on the policy's own samples."""

from dataclasses import dataclass, fields
from typing import Literal

from megarl.config.setting import AT_LEAST_0, AT_LEAST_1, FRACTION, POSITIVE, PROBABILITY, setting
from megarl.registry import refuse_unused


@dataclass(frozen=True, slots=True, kw_only=True)
class DistillConfig:
    """Pull the policy towards a teacher, beside whatever the rewards ask for. See docs/algorithms/distillation.md."""

    # Who teaches. none: nobody; model: the models of the sections teacher and teachers; hint: the policy itself, or the
    # model of the section teacher, which reads the prompt with the hint of algo.cpo.hint in it.
    teacher: Literal["none", "model", "hint"] = "none"
    # The teacher begins as the policy, and after each optimizer step its weights move by this share of the way to the
    # policy's: an exponential moving average; 0: they stay, 1: they are the policy's. null: the teacher is the model
    # of the section teacher or, with hints and without one, the policy itself.
    teacher_update_rate: float | None = setting(None, FRACTION)
    # sampled: the log-prob of each sampled token under the teacher minus that under the policy is added to the token's
    # advantage; exact: a divergence over the whole vocabulary is added to the loss; topk: the same over the teacher's
    # most likely tokens and one bucket for all others.
    mode: Literal["sampled", "exact", "topk"] = "sampled"
    # exact, topk: reverse is KL(policy ‖ teacher), forward is KL(teacher ‖ policy), jsd is β·KL(teacher ‖ m) +
    # (1 − β)·KL(policy ‖ m) with m = (1 − β)·policy + β·teacher. sampled has the gradient of reverse.
    divergence: Literal["reverse", "forward", "jsd"] = "reverse"
    # jsd: β; near 0 it behaves as forward, near 1 as reverse.
    beta: float = setting(0.5, PROBABILITY)
    coef: float = setting(1.0, POSITIVE)  # Coefficient of the log-ratios or of the divergence.
    top_k: int = setting(64, AT_LEAST_1)  # topk: number of tokens that the teacher tells apart.
    # sampled: a token also gets the log-ratios of the tokens after it, each times this for every token between them;
    # 0: only its own, 1: the whole rest of the response.
    discount: float = setting(0.0, FRACTION)
    decay_steps: int = setting(0, AT_LEAST_0)  # Steps over which coef falls linearly to 0; 0: it stays.
    exclude_answer: bool = False  # hint: teach nothing on tokens of the final answer (boxed, or after ####).
    # hint, sampled: subtract the log-probs with another prompt's hint instead of those of the policy.
    shuffled_baseline: bool = False

    @property
    def is_sampled(self) -> bool:
        """Return whether log-ratios of samples are added to advantages."""
        return self.teacher != "none" and self.mode == "sampled"

    @property
    def is_dense(self) -> bool:
        """Return whether the loss has a divergence between distributions, and not only log-probs of samples."""
        return self.teacher != "none" and self.mode != "sampled"

    @property
    def averages(self) -> bool:
        """Return whether the teacher begins as the policy and then follows it, as the moving average of its weights."""
        return self.teacher_update_rate is not None

    @property
    def asked_top_k(self) -> int | None:
        """Return how many of its likeliest tokens a teacher is asked for; None: none."""
        return self.top_k if self.is_dense and self.mode == "topk" else None

    def check(self, key: str) -> None:
        """Raise ConfigError for settings that the mode, or a run without a teacher, does not read."""
        if self.teacher == "none":
            others = (each.name for each in fields(self) if each.name != "teacher")
            refuse_unused(key, self, others, f"{key}.teacher=none", f"set {key}.teacher=model or hint")
        if self.teacher == "model":
            unread = ("exclude_answer", "shuffled_baseline")
            refuse_unused(key, self, unread, f"{key}.teacher=model", f"set {key}.teacher=hint")
        if self.mode == "sampled":
            situation, remedy = f"{key}.mode=sampled", f"set {key}.mode=exact or topk"
            refuse_unused(key, self, ("divergence", "beta", "top_k"), situation, remedy)
        else:
            unread = ("discount", "shuffled_baseline")
            refuse_unused(key, self, unread, f"{key}.mode={self.mode}", f"set {key}.mode=sampled")
        if self.mode == "exact":
            refuse_unused(key, self, ("top_k",), f"{key}.mode=exact", f"set {key}.mode=topk")
        if self.divergence != "jsd":
            refuse_unused(key, self, ("beta",), f"{key}.divergence={self.divergence}", f"set {key}.divergence=jsd")
