"""Sample with a teacher: it writes demonstrations for some prompts, with which samples of these prompts start."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from megarl.algos.prefixes import keeps_demonstration, prefix_ratios
from megarl.config.algo import DemonstrationConfig
from megarl.data.stop_tokens import StopTokens
from megarl.rollout.source import Group, RolloutSource
from megarl.train.prefixes import plan_prefixes
from megarl.train.served_teacher import TeacherWriter
from megarl.types import Prompt, Sample
from megarl.types.seeds import sample_seed


@dataclass(frozen=True, slots=True, kw_only=True)
class TaughtSource:
    """A source whose prompts get a demonstration from their teacher, as `algo.demonstrations` asks, before they are
    sampled.

    Prompts with an environment get none. live: samples all else. writer_of: returns the teacher of a prompt's samples.
    """

    demonstrations: DemonstrationConfig
    num_samples: int
    live: RolloutSource
    writer_of: Callable[[Prompt], TeacherWriter]
    stop_tokens: StopTokens

    async def sample(self, group: Group) -> None:
        """Have the teacher write, unless all samples that start with a demonstration are under way, and sample."""
        cfg, plan, uid = self.demonstrations, group.plan, group.prompt.uid
        ratios = prefix_ratios(cfg, uid=uid, step=plan.step, num_samples=self.num_samples, run_seed=plan.run_seed)
        have = {*group.samples, *group.parts}
        wanted = any(ratio > 0 and i not in have for i, ratio in enumerate(ratios))
        if wanted and not group.prompt.environment and keeps_demonstration(cfg, uid=uid, run_seed=plan.run_seed):
            ids = await self.writer_of(group.prompt).write(
                group.prompt,
                max_tokens=min(cfg.max_tokens, plan.max_response_tokens),
                # No sample of the policy has this seed.
                seed=sample_seed(plan.run_seed, plan.step, uid, -1),
            )
            is_cut = not self.stop_tokens.are_at_end_of(ids)
            group.prompt = replace(group.prompt, demonstration_ids=() if is_cut and cfg.on_long == "drop" else ids)
            prefixes = plan_prefixes(
                [group.prompt],
                cfg,
                step=plan.step,
                num_samples=self.num_samples,
                run_seed=plan.run_seed,
                end_token_ids=self.stop_tokens.token_ids,
            )
            group.plan = replace(plan, prefixes={**plan.prefixes, **prefixes})
        await self.live.sample(group)

    def parts(self, groups: Iterable[Group]) -> list[Sample]:
        return self.live.parts(groups)
