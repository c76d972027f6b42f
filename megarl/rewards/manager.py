"""Rewards of a whole batch: every judge that has a say, their mixture, and correctness apart from it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from megarl.rewards.hybrid import Summand, mix
from megarl.rewards.judge import Item, Judge, Judged, Tally, mean_of
from megarl.types import DROPPED, Prompt, Reward, RolloutBatch, Sample

Decode: TypeAlias = Callable[[Sequence[int]], str]

# The name of the rule among judges.
RULE = "rule"


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """Who judges: by name the judges, and what the reward of each counts. `route` names those of a data source.

    knows: whether the rule can judge a data source. There it decides what is correct, whoever is rewarded for what.
    """

    judges: Mapping[str, Judge]
    summands: Mapping[str, Summand]
    route: Callable[[str], Sequence[str]]
    knows: Callable[[str], bool]

    def asked(self, data_source: str) -> list[str]:
        """The judges of a data source, the rule also where it only decides what is correct."""
        rule = [RULE] if self.knows(data_source) else []
        return list(dict.fromkeys([*self.route(data_source), *rule]))

    def by_rule(self) -> "Panel":
        """The rule alone."""
        rule = {RULE: self.judges[RULE]}
        return replace(self, judges=rule, summands={RULE: Summand()}, route=lambda _: (RULE,))


class RewardManager:
    """Judges samples as they finish."""

    def __init__(self, panel: Panel, decode: Decode, show: Decode) -> None:
        """`decode` turns response token ids into text, see `megarl.data.chat.response_decoder`; `show` prompts, with
        their special tokens.
        """
        self.panel, self._decode, self._show = panel, decode, show

    def begin(self) -> "BatchJudging":
        """A new batch."""
        return BatchJudging(self.panel, self._decode, self._show)

    def score(self, batch: RolloutBatch) -> Judged:
        """Rewards of a finished batch, in the order of its samples."""
        judging = self.begin()
        for sample in batch.samples:
            judging.add(batch.prompts[sample.uid], sample)
        return judging.finish(batch.samples)

    def close(self) -> None:
        """End all judges."""
        for judge in self.panel.judges.values():
            judge.close()


class BatchJudging:
    """The judging of one batch: `add` every sample once, in any order, then `finish`."""

    def __init__(self, panel: Panel, decode: Decode, show: Decode) -> None:
        self._panel, self._decode, self._show = panel, decode, show
        self._judgings = {name: judge.begin() for name, judge in panel.judges.items()}
        self._prompts: dict[str, str] = {}
        # By row, in the order of `add`; and by judge, the rows that it was asked about.
        self._items: list[Item] = []
        self._asked: dict[str, list[int]] = {name: [] for name in panel.judges}

    def add(self, prompt: Prompt, sample: Sample) -> None:
        """Take a finished sample; returns at once."""
        if prompt.uid not in self._prompts:
            self._prompts[prompt.uid] = self._show(prompt.token_ids)
        response = self._decode(sample.response_token_ids.tolist())
        item = Item(prompt=prompt, sample=sample, prompt_text=self._prompts[prompt.uid], response=response)
        for name in self._panel.asked(prompt.data_source):
            self._asked[name].append(len(self._items))
            self._judgings[name].add(item)
        self._items.append(item)

    def finish(self, samples: Sequence[Sample]) -> Judged:
        """Wait for the rewards of these samples, in their order."""
        judged = {name: judging.finish() for name, judging in self._judgings.items()}
        opinions = {name: dict(zip(self._asked[name], each.rewards, strict=True)) for name, each in judged.items()}
        rewards = self._mixed(opinions)
        rows = {(item.sample.uid, item.sample.sample_index): row for row, item in enumerate(self._items)}
        tallies: dict[str, Tally] = {name: tally for each in judged.values() for name, tally in each.tallies.items()}
        tallies |= self._part_scores(opinions)
        tallies["reward/dropped_rows"] = Tally(total=sum(reward.dropped for reward in rewards))
        return Judged(rewards=[rewards[rows[s.uid, s.sample_index]] for s in samples], tallies=tallies)

    def _mixed(self, opinions: Mapping[str, Mapping[int, Reward]]) -> list[Reward]:
        routes = [self._panel.route(item.prompt.data_source) for item in self._items]
        dropped = {row for row, route in enumerate(routes) if any(opinions[name][row].dropped for name in route)}
        scores = {
            name: {
                row: reward.score
                for row, reward in opinions[name].items()
                if name in routes[row] and row not in dropped
            }
            for name in self._panel.summands
        }
        total = mix(scores, self._panel.summands, [item.prompt.uid for item in self._items])
        heard = [{name: each[row] for name, each in opinions.items() if row in each} for row in range(len(routes))]
        return [
            DROPPED if row in dropped else self._reward(total[row], heard[row], route)
            for row, route in enumerate(routes)
        ]

    def _reward(self, score: float, opinions: Mapping[str, Reward], route: Sequence[str]) -> Reward:
        """Correct is what the rule says; without a rule, what the first part says."""
        judge = opinions.get(RULE) or opinions[route[0]]
        if len(opinions) == 1:
            return replace(judge, score=score)
        details = {f"{name}/score": opinion.score for name, opinion in opinions.items() if not opinion.dropped}
        return Reward(score=score, correct=judge.correct, details={**judge.details, **details})

    def _part_scores(self, opinions: Mapping[str, Mapping[int, Reward]]) -> dict[str, Tally]:
        if len(opinions) < 2:
            return {}
        return {
            f"reward/{name}/score": mean_of(reward.score for reward in each.values() if not reward.dropped)
            for name, each in opinions.items()
        }
