"""Reward a batch with all judges of its data sources: mix their rewards, and decide separately what is correct."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from megarl.rewards.hybrid import Summand, mix
from megarl.rewards.judge import Judge, Judged, JudgeSession, Tally, mean_of
from megarl.types import DROPPED, FinishReason, Prompt, Reward, Sample
from megarl.types.judged import FinishedSample, Trouble

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# The rule's name among the judges.
RULE = "rule"


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardManager:
    """The judges of a run. They judge samples as they finish, and their rewards are mixed.

    judges, summands: by name, the judges, and the weight and transform of each one's reward.
    route: returns the names of the judges whose rewards are mixed for a data source.
    knows: returns whether the rule can judge a data source; the rule then decides which answers are correct.
    decode: turns response token ids into text, see `megarl.data.answers.response_decoder`.
    tokenizer: the policy's, which turns prompts into text with their special tokens.
    """

    judges: Mapping[str, Judge[Any]]
    summands: Mapping[str, Summand]
    route: Callable[[str], Sequence[str]]
    knows: Callable[[str], bool]
    decode: Callable[[Sequence[int]], str]
    tokenizer: "PreTrainedTokenizerBase"

    def asked(self, data_source: str) -> list[str]:
        """Return the names of all judges that see a data source's samples; the rule may be there only to decide
        correctness.
        """
        rule = [RULE] if self.knows(data_source) else []
        return list(dict.fromkeys([*self.route(data_source), *rule]))

    def by_rule(self) -> "RewardManager":
        """Return a manager whose only judge is the rule, for evaluation."""
        rule = {RULE: self.judges[RULE]}
        return replace(self, judges=rule, summands={RULE: Summand()}, route=lambda _: (RULE,))

    def begin(self) -> "Judging":
        """Begin to judge a group or a batch."""
        return Judging(manager=self, sessions={name: judge.begin() for name, judge in self.judges.items()})

    def finish(self, judgings: "Sequence[Judging]", samples: Sequence[Sample]) -> Judged:
        """Judge the samples of these judgings as one batch, and return rewards in the order of `samples`.

        Correctness is decided by the rule or, where no rule applies, by the first judge of the data source. A row is
        dropped if any of its judges drops it.
        """
        judged = {name: judge.finish([each.sessions[name] for each in judgings]) for name, judge in self.judges.items()}
        asked = {item: names for each in judgings for item, names in each.asked.items()}
        items, opinions = list(asked), dict[str, dict[int, Reward]]()
        for name, each in judged.items():
            rows_asked = [row for row, names in enumerate(asked.values()) if name in names]
            opinions[name] = dict(zip(rows_asked, each.rewards, strict=True))
        routes = [self.route(item.prompt.data_source) for item in items]
        failed = {row for row, item in enumerate(items) if item.sample.finish_reason is FinishReason.FAILED}
        dropped = failed | {
            row
            for row, route in enumerate(routes)
            if row not in failed and any(opinions[name][row].dropped for name in route)
        }
        scores = {
            name: {
                row: reward.score
                for row, reward in opinions[name].items()
                if name in routes[row] and row not in dropped
            }
            for name in self.summands
        }
        total = mix(scores, self.summands, [item.prompt.uid for item in items])
        rewards = [
            DROPPED
            if row in dropped
            else _combined({name: each[row] for name, each in opinions.items() if row in each}, route, total[row])
            for row, route in enumerate(routes)
        ]
        tallies: dict[str, Tally] = {name: tally for each in judged.values() for name, tally in each.tallies.items()}
        if len(opinions) > 1:
            for name, by_row in opinions.items():
                kept = (reward.score for reward in by_row.values() if not reward.dropped)
                tallies[f"reward/{name}/score"] = mean_of(kept)
        num_dropped = sum(reward.dropped for reward in rewards)
        tallies["reward/dropped_rows"] = Tally(total=num_dropped)
        tallies["reward/dropped_frac"] = Tally(total=num_dropped, over=len(rewards))
        troubles = [self._named(trouble, name) for name, each in judged.items() for trouble in each.troubles]
        for item in (items[row] for row in sorted(failed)):
            episode = item.sample.episode
            assert episode is not None, "only environments fail samples"
            why = f"{episode.failure}: {episode.reason}"
            troubles.append(Trouble(item=item, outcome="failed", reason=why, judge="environment"))
        rows = {(item.sample.uid, item.sample.sample_index): row for row, item in enumerate(items)}
        return Judged(
            rewards=[rewards[rows[s.uid, s.sample_index]] for s in samples], tallies=tallies, troubles=troubles
        )

    def _named(self, trouble: Trouble, name: str) -> Trouble:
        """Name the judge that had a trouble, and say so if the sample's reward is that of others."""
        route, reason = self.route(trouble.item.prompt.data_source), trouble.reason
        if name not in route:
            reason += f" ({name} decides only what is correct; the reward is that of {', '.join(route)})"
        return replace(trouble, judge=name, reason=reason)

    def close(self) -> None:
        """End the processes and connections of all judges."""
        for judge in self.judges.values():
            judge.close()


@dataclass(slots=True, kw_only=True)
class Judging:
    """The judging of one group or batch: `add` every sample once, in any order, then call `RewardManager.finish`.

    sessions: what each judge was told of, by the judge's name. asked: all samples, with the names of their judges.
    """

    manager: RewardManager
    sessions: Mapping[str, JudgeSession]
    asked: dict[FinishedSample, Sequence[str]] = field(default_factory=dict)
    prompt_texts: dict[str, str] = field(default_factory=dict)

    def read(self, sample: Sample) -> str:
        """Return the text of a sample's last turn, in whichever thread."""
        # The text of an environment is not an answer of the policy.
        return self.manager.decode(sample.last_turn_ids.tolist())

    def add(self, prompt: Prompt, sample: Sample, response: str | None = None) -> None:
        """Accept a finished sample, without waiting for its reward. response: what `read` says, if it was asked."""
        if prompt.uid not in self.prompt_texts:
            self.prompt_texts[prompt.uid] = str(self.manager.tokenizer.decode(prompt.token_ids))
        text = self.read(sample) if response is None else response
        item = FinishedSample(prompt=prompt, sample=sample, prompt_text=self.prompt_texts[prompt.uid], response=text)
        is_failed = sample.finish_reason is FinishReason.FAILED
        self.asked[item] = () if is_failed else self.manager.asked(prompt.data_source)
        for name in self.asked[item]:
            self.sessions[name].add(item)

    def pending(self) -> list[Future[object]]:
        """Return all answers that have been asked for; `RewardManager.finish` asks for the rest, and raises errors."""
        return [future for session in self.sessions.values() for future in session.pending()]


def _combined(heard: Mapping[str, Reward], route: Sequence[str], score: float) -> Reward:
    """Give a sample's mixed reward the findings of all judges that were asked about it."""
    decisive = heard.get(RULE, DROPPED)
    if decisive.dropped:  # It may have no opinion, and not be one of those that are mixed.
        decisive = heard[route[0]]
    details, own, silent = decisive.details, decisive.own_score, list(decisive.no_opinion)
    if len(heard) > 1:
        said = {f"{name}/score": opinion.score for name, opinion in heard.items() if not opinion.dropped}
        details = {**details, **said}
        silent += [f"{name}/score" for name, opinion in heard.items() if opinion.dropped]
        own = decisive.score if own is None else own
    notes = {key: note for opinion in heard.values() for key, note in opinion.notes.items()} | dict(decisive.notes)
    return replace(decisive, score=score, details=details, notes=notes, own_score=own, no_opinion=tuple(silent))
