"""Check at the start of a run that every sample has a teacher, and how much of the vocabulary all of them share."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megarl.algos.policy_losses import POLICY_LOSSES
from megarl.config.algo import AlgoConfig, DistillConfig
from megarl.config.schema import TeacherConfig
from megarl.data.answers import Answers
from megarl.data.teacher_tokens import TeacherTokens, compare_tokens
from megarl.types.messages import Role, RoleSpec, Teaching
from megarl.weights.families import ModelSpec, read_hf_config, read_model_spec

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def open_teachers(
    asked: Mapping[str, TeacherConfig], tokenizer: "PreTrainedTokenizerBase", answers: Answers
) -> tuple[TeacherTokens, ...]:
    """Compare the tokens of all teachers with the policy's; ConfigError as in `compare_tokens`."""
    named = {key: each.model_path for key, each in asked.items()}
    return tuple(
        compare_tokens(tokenizer, answers, path, f"{key}.model_path") for key, path in named.items() if path is not None
    )


def teaching_of(distill: DistillConfig, roles: Sequence[RoleSpec], common: int | None) -> Teaching | None:
    """Return how updates of the actor compare it with a teacher over the vocabulary; None: they do not.

    common: how many tokens both share, as `common_tokens` says.
    """
    if not distill.is_dense:
        return None
    role = next((role.role for role in roles if role.in_update_of is Role.ACTOR), None)
    reads_hints = distill.teacher == "hint" and distill.mode == "exact"
    return Teaching(
        # Nobody else: the policy itself.
        role=Role.ACTOR if reads_hints and role is None else role,
        divergence=distill.divergence,
        beta=distill.beta,
        common=common,
        reads_hints=reads_hints,
    )


def comparison_of(algo: AlgoConfig, roles: Sequence[RoleSpec], common: int | None) -> Teaching | None:
    """Return how updates of the actor compare it over the vocabulary: with what sampled, if the policy loss asks for
    it, or as `teaching_of` says.
    """
    loss = algo.policy_loss
    if (measure := POLICY_LOSSES.get(loss.name).measure) is None:
        return teaching_of(algo.distill, roles, common)
    if loss.compared_with == "trainer":
        return Teaching(role=Role.ACTOR, kept=0, measure=measure(loss))
    return Teaching(measure=measure(loss))


def common_tokens(
    asked: Mapping[str, TeacherConfig], spec: ModelSpec, roles: Sequence[RoleSpec], teachers: Sequence[TeacherTokens]
) -> int | None:
    """Return how many tokens from the first on policy and teachers share, by their tokenizers and embeddings; None: all
    of them. There may be no more than a tokenizer of a teacher behind servers.
    """
    sizes = [read_model_spec(role.model.path).dims.vocab for role in roles if role.role.kind is Role.TEACHER]
    for path in (each.model_path for each in asked.values() if each.servers and each.model_path):
        if (Path(path) / "config.json").is_file():
            described = read_hf_config(Path(path), "teacher.model_path")
            sizes.append(described.get("text_config", described).get("vocab_size", spec.dims.vocab))
    cuts = [each.common for each in teachers if each.common is not None]
    if all(size == spec.dims.vocab for size in sizes) and not cuts:
        return None
    return min([*cuts, *sizes, spec.dims.vocab])
