"""Conversations of samples, with engines and hosts that answer from tables: token 100 + n is the policy's turn n."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pytest

from megarl.config.environments import EnvironmentConfig
from megarl.config.generation import Sampling
from megarl.host import loop
from megarl.rollout.conversations import Conversation, WorkerLostError, episode_of
from megarl.rollout.engine import Completion, GenerationRequest
from megarl.rollout.source import Group, Prefix, SamplingPlan
from megarl.rollout.turns import turn_quantities
from megarl.rollout.vllm_source import VllmSource
from megarl.types import (
    ChatPart,
    FinishReason,
    Message,
    Prompt,
    Sample,
    SegmentSource,
    row_from_sample,
    version_spans,
)
from megarl.types.episodes import EpisodeReply, StartRequest, TriesRequest, TurnRequest
from megarl.types.forks import Fork
from megarl.types.rows import paths_of
from megarl.types.seeds import try_seed
from megarl.types.turns import Tries
from tests.helpers.loops import begin_groups, turns

END = 2
PROMPT = Prompt(uid="a", token_ids=(5, 6), data_source="d", ground_truth="", environment="game")
PLAN = SamplingPlan(step=1, num_samples=1, sampling=Sampling(temperature=1.0), max_response_tokens=20, run_seed=0)


@dataclass
class World:
    """Engines and hosts of one test: requests wait until the test answers them."""

    requests: list[tuple[GenerationRequest, "asyncio.Future[Completion]"]] = field(default_factory=list)
    started: list[StartRequest] = field(default_factory=list)
    acts: list[TurnRequest | TriesRequest] = field(default_factory=list)
    ended: list[int] = field(default_factory=list)
    talks: list[Conversation] = field(default_factory=list)
    # The conversations to which a reply is owed, in the order in which it was asked for.
    owed: list[Conversation] = field(default_factory=list)

    # --- as engines

    def generate(self, request: GenerationRequest) -> "asyncio.Future[Completion]":
        future: asyncio.Future[Completion] = loop.event_loop().create_future()
        self.requests.append((request, future))
        return future

    def parts(self) -> "dict[asyncio.Future[Completion], Completion]":
        return {future: completion([99], FinishReason.ABORT) for _, future in self.requests}

    # --- as hosts

    def start(self, request: StartRequest) -> Conversation:
        self.started.append(request)
        talk = Conversation(key=len(self.talks), worker=0, reply=loop.event_loop().create_future())
        self.talks.append(talk)
        self.owed.append(talk)
        return talk

    def act(self, talk: Conversation, request: TurnRequest | TriesRequest) -> None:
        self.acts.append(request)
        talk.reply = loop.event_loop().create_future()
        self.owed.append(talk)

    def end(self, talk: Conversation) -> None:
        self.ended.append(talk.key)

    # --- as the test

    def reply(self, *token_ids: int, place: int = 0, **rest: object) -> None:
        """Answer what is owed, the oldest first."""
        self.owed.pop(place).reply.set_result(EpisodeReply(token_ids=token_ids, **rest))  # type: ignore[arg-type]
        loop.wait(turns())

    def lose(self, key: int, *, owes: bool, with_node: bool = False) -> None:
        """Let the host of a conversation die, as `EnvironmentWorkers.mend` tells it. owes: whether it owed a reply."""
        talk = self.talks[key]
        talk.is_lost = True
        assert owes is (talk in self.owed)
        if owes:
            self.owed.remove(talk)
            talk.reply.set_exception(WorkerLostError(with_node))
        loop.wait(turns())

    def speak(
        self,
        *token_ids: int,
        reason: FinishReason = FinishReason.STOP,
        engine: int = 1,
        expert: int | None = None,
        place: int = 0,
    ) -> GenerationRequest:
        """Answer a request. expert: the one that it sends all tokens to, in two layers, three times each."""
        request, future = self.requests.pop(place)
        answer = replace(completion(token_ids, reason), engine=engine)
        if expert is not None:
            num_read = len(request.token_ids) - request.num_routed + len(token_ids) - 1
            answer = replace(answer, routed_experts=np.full((num_read, 2, 3), expert, np.int16))
        future.set_result(answer)
        loop.wait(turns())
        return request


def completion(token_ids: Sequence[int], reason: FinishReason) -> Completion:
    n = len(token_ids)
    return Completion(
        token_ids=np.asarray(token_ids, dtype=np.int32),
        logprobs=np.full(n, -0.5, dtype=np.float32),
        finish_reason=reason,
        versions=version_spans(np.full(n, 3)),
    )


def begin(*, plan: SamplingPlan = PLAN, begun: Sequence[Sample] = (), **limits: int) -> tuple[World, VllmSource, Group]:
    world = World()
    source = VllmSource(world, world, EnvironmentConfig(**limits))
    (group,) = begin_groups(source, [PROMPT], plan, begun=begun)
    return world, source, group


def sample_of(group: Group) -> Sample:
    (sample,) = group.samples.values()
    return sample


def test_turns_and_replies_follow_each_other_until_the_environment_ends() -> None:
    world, _, group = begin()
    assert world.started == [StartRequest(prompt=PROMPT)]
    assert world.requests == []
    world.reply()
    first = world.speak(100, END)
    assert (first.token_ids, first.max_tokens, first.num_before, first.engine) == ((5, 6), 20, 0, None)
    assert world.acts == [TurnRequest(token_ids=(100, END), turn=0, num_before=2)]
    world.reply(7, 8, reward=0.25, num_calls=2, details={"a": 1, "b": 1}, seconds=0.5)
    second = world.speak(101, END, engine=0)
    # It goes to the engine that has the keys, with the seed of its place among the policy's tokens.
    assert (second.token_ids, second.max_tokens) == ((5, 6, 100, END, 7, 8), 16)
    assert (second.num_before, second.engine, second.seed) == (2, 1, first.seed)
    assert world.acts[1] == TurnRequest(token_ids=(101, END), turn=1, num_before=6)
    assert not group.is_done
    world.reply(done=True, reward=1.0, num_calls=1, details={"a": 3}, seconds=0.25)
    assert group.is_done
    assert world.ended == [0]
    sample = sample_of(group)
    assert sample.response_token_ids.tolist() == [100, END, 7, 8, 101, END]
    assert sample.loss_mask.tolist() == [True, True, False, False, True, True]
    assert sample.turn_rewards.tolist() == [0, 0.25, 0, 0, 0, 1.0]
    assert sample.rollout_logprobs.tolist() == [-0.5, -0.5, 0, 0, -0.5, -0.5]
    assert sample.last_turn_ids.tolist() == [101, END]
    assert sample.finish_reason is FinishReason.STOP
    episode = sample.episode
    assert episode is not None
    assert (episode.num_turns, episode.num_calls, episode.seconds) == (2, 3, 0.75)
    assert episode.details == {"a": 3, "b": 1}


def test_what_an_environment_said_is_marked_in_its_segments() -> None:
    world, _, group = begin()
    world.reply()
    world.speak(100, END)
    world.reply(7, 8, 9, observed=((1, 2),))
    world.speak(101, END)
    # A context that repeats all there is, and two more tokens of which the second is new.
    world.reply(5, 6, 100, END, 7, 8, 9, 101, END, 30, 31, is_context=True, observed=((5, 6), (10, 11)))
    world.speak(102, END)
    world.reply(40, observed=())
    world.speak(103, END)
    world.reply(41)
    world.speak(104, END)
    world.reply(done=True)
    sample = sample_of(group)
    of_replies = [s.observed for s in sample.segments if s.source is SegmentSource.ENVIRONMENT]
    assert [None if mask is None else mask.tolist() for mask in of_replies] == [
        [False, True, False],
        [False, True],
        [False],
        None,
    ]
    assert np.flatnonzero(sample.observed).tolist() == [3, 8]
    assert sample.observed.dtype == np.float32


def test_what_was_written_after_another_prompt_is_dropped() -> None:
    """A conversation from a checkpoint, whose environment opens it anew: with the same messages it goes on."""
    world, source, group = begin()
    world.reply(5, 6, 30)
    world.speak(100, END)
    (saved,) = source.parts([group])
    resumed, _, _ = begin(begun=[saved])
    resumed.reply(5, 6, 30)
    assert resumed.acts == [TurnRequest(token_ids=(100, END), turn=0, num_before=3)]
    resumed, _, _ = begin(begun=[saved])
    resumed.reply(5, 6, 31)
    assert resumed.acts == []
    assert resumed.requests[0][0].token_ids == (5, 6, 31)


def test_an_environment_may_limit_the_next_turn() -> None:
    world, _, _ = begin(max_turn_tokens=5)
    world.reply(max_turn_tokens=3)
    assert world.speak(100, END).max_tokens == 3
    world.reply(7, max_turn_tokens=9)
    assert world.speak(101, END).max_tokens == 5


@pytest.mark.parametrize(
    ("limits", "max_response", "reply", "requested"),
    [({"max_turns": 1}, 20, 1, 20), ({}, 6, 4, 6), ({}, 7, 4, 7), ({"max_turn_tokens": 3}, 20, 1, 3)],
)
def test_limits_cut_conversations(limits: dict[str, int], max_response: int, reply: int, requested: int) -> None:
    """Turns of 2 tokens: a reply of 4 leaves no room for a turn in 6 tokens, and room for one token in 7."""
    world, _, group = begin(plan=replace(PLAN, max_response_tokens=max_response), **limits)
    world.reply()
    assert world.speak(100, END).max_tokens == requested
    world.reply(*[7] * reply, reward=0.5)
    if limits == {"max_turns": 1} or max_response == 6:
        sample = sample_of(group)
        assert sample.finish_reason is FinishReason.LENGTH
        # The reply that nobody reads is left out; its reward counts.
        assert sample.response_token_ids.tolist() == [100, END]
        assert sample.turn_rewards.tolist() == [0, 0.5]
    else:
        assert world.requests[0][0].max_tokens == (1 if max_response == 7 else 3)


@pytest.mark.parametrize("reason", [FinishReason.LENGTH, FinishReason.REPETITION])
def test_a_turn_that_its_limit_or_the_engine_cuts_gets_a_reply_and_one_that_the_conversation_cuts_none(
    reason: FinishReason,
) -> None:
    world, _, group = begin(plan=replace(PLAN, max_response_tokens=5), max_turn_tokens=2)
    world.reply()
    world.speak(100, 101, reason=reason)
    assert world.acts == [TurnRequest(token_ids=(100, 101), turn=0, is_cut=True, num_before=2)]
    world.reply(7)
    assert world.speak(102, 103, reason=FinishReason.LENGTH).max_tokens == 2
    assert len(world.acts) == 1
    assert sample_of(group).finish_reason is FinishReason.LENGTH
    assert world.ended == [0]


def test_a_failure_ends_the_sample_alone() -> None:
    world, _, group = begin(plan=replace(PLAN, num_samples=2))
    world.reply(failure="raised", reason="KeyError: 'x'")
    world.reply()
    world.speak(100, END)
    world.reply(done=True)
    failed, fine = (group.samples[i] for i in range(2))
    assert (failed.finish_reason, fine.finish_reason) == (FinishReason.FAILED, FinishReason.STOP)
    assert failed.episode is not None
    assert (failed.episode.failure, failed.episode.reason) == ("raised", "KeyError: 'x'")


def test_a_prefix_that_is_a_whole_turn_goes_to_the_environment() -> None:
    prefix = Prefix(token_ids=(50, END), is_complete=True)
    world, _, group = begin(plan=replace(PLAN, prefixes={("a", 0): prefix}))
    world.reply()
    assert world.acts == [TurnRequest(token_ids=(50, END), turn=0, num_before=2)]
    world.reply(7)
    request = world.speak(100, END)
    assert (request.token_ids, request.num_before) == ((5, 6, 50, END, 7), 0)
    world.reply(done=True)
    sources = [segment.source for segment in sample_of(group).segments]
    assert sources[1:] == [SegmentSource.DEMONSTRATION, SegmentSource.ENVIRONMENT, SegmentSource.POLICY]


@pytest.mark.parametrize("is_whole", [True, False])
def test_a_conversation_that_begins_again_keeps_its_demonstration(is_whole: bool) -> None:
    prefix = Prefix(token_ids=(50, END) if is_whole else (50,), is_complete=is_whole)
    world, _, group = begin(plan=replace(PLAN, prefixes={("a", 0): prefix}))
    world.reply()
    if not is_whole:
        world.speak(100, END)
    world.reply(7, reward=0.5)
    # The host dies while the engine writes a turn, and the environment cannot go on.
    world.lose(0, owes=False)
    world.speak(101, END)
    world.reply(is_anew=True)
    first = (50, END) if is_whole else (50, 102, END)
    if not is_whole:
        assert world.speak(102, END).token_ids == (5, 6, 50)
    assert world.acts[-1] == TurnRequest(token_ids=first, turn=0, num_before=2)
    world.reply(done=True, reward=0.25)
    sample = sample_of(group)
    assert sample.response_token_ids.tolist() == list(first)
    assert sample.turn_rewards.sum() == 0.25
    assert sample.episode is not None
    assert sample.episode.num_turns == 1


def test_a_lost_host_costs_a_conversation_its_environment_only_where_that_cannot_go_on() -> None:
    world, _, _ = begin()
    world.reply()
    world.speak(100, END)
    world.reply(7)
    # The host dies while the engine writes the second turn; the environment is asked to go on after it.
    world.lose(0, owes=False)
    world.speak(101, END)
    assert world.started[1] == StartRequest(prompt=PROMPT, turns=((100, END),))
    world.reply()
    assert world.acts[-1] == TurnRequest(token_ids=(101, END), turn=1, num_before=5)
    # It dies again, while it owes a reply; this environment cannot go on.
    world.lose(1, owes=True)
    assert world.started[2].turns == ((100, END),)
    world.reply(is_anew=True)
    assert world.requests[0][0].token_ids == (5, 6)
    assert world.requests[0][0].num_before == 0


def test_what_an_environment_said_goes_with_the_turns_to_another_host() -> None:
    """For a history that is rendered. The opening counts once, and nothing of a conversation that begins again."""
    opening, answer, other = (
        ChatPart(turn=turn, messages=(Message(role="user", content=text),), after=after)
        for turn, text, after in ((0, "go", None), (1, "no", 0), (0, "begin", None))
    )
    world, _, group = begin()
    world.reply(5, 6, 30, part=opening)
    world.lose(0, owes=False)
    world.speak(100, END)
    world.reply(5, 6, 30, part=opening)
    world.reply(7, part=answer)
    world.lose(1, owes=False)
    world.speak(101, END)
    assert world.started[2] == StartRequest(prompt=PROMPT, turns=((100, END),), chat=(opening, answer))
    world.reply(5, 6, 31, is_anew=True, part=other)
    world.speak(102, END)
    assert [episode_of(each).chat for each in group.parts.values()] == [(other,)]
    world.reply(done=True, reward=1.0)
    assert episode_of(sample_of(group)).chat == ()


def test_a_conversation_that_owes_a_reply_in_two_deaths_fails() -> None:
    """Unless its host's node was lost, too."""
    world, _, group = begin()
    for i in range(3):
        world.lose(i, owes=True, with_node=i < 2)
    assert not group.is_done
    world.lose(3, owes=True)
    sample = sample_of(group)
    assert sample.finish_reason is FinishReason.FAILED
    assert sample.episode is not None
    assert (sample.episode.failure, sample.episode.num_restarts) == ("died", 1)


def test_a_checkpoint_holds_conversations_wherever_they_are() -> None:
    world, source, begun = begin(plan=replace(PLAN, num_samples=3))
    for _ in range(3):
        world.reply()
    # The first waits for a reply, the second has a reply and the start of a turn, the third nothing but that.
    world.speak(100, END)
    world.speak(100, END)
    world.reply(7, place=1)
    saved = {sample.sample_index: sample for sample in source.parts([begun])}
    assert [saved[i].response_token_ids.tolist() for i in range(3)] == [[100, END], [100, END, 7, 99], [99]]
    assert {sample.finish_reason for sample in saved.values()} == {FinishReason.ABORT}

    resumed, _, group = begin(plan=replace(PLAN, num_samples=3), begun=list(saved.values()))
    assert [request.turns for request in resumed.started] == [(), ((100, END),), ()]
    for _ in range(3):
        resumed.reply()
    assert resumed.acts == [TurnRequest(token_ids=(100, END), turn=0, num_before=2)]
    assert [(r.token_ids, r.num_before, r.max_tokens) for r, *_ in resumed.requests] == [
        ((5, 6, 100, END, 7, 99), 3, 16),
        ((5, 6, 99), 1, 19),
    ]
    resumed.speak(101, END)
    assert resumed.acts[1] == TurnRequest(token_ids=(99, 101, END), turn=1, num_before=5)
    assert not group.samples


def test_a_context_that_differs_begins_a_branch_where_it_does() -> None:
    """The prompt is 5 6. Turns: 100, then after 5 6 41 42: 101, after 9 (a root): 102, after 101 2 once more: 103."""
    world, _, group = begin()
    world.reply()
    world.speak(100, END)
    world.reply(5, 6, 41, 42, is_context=True)
    first = world.speak(101, END)
    world.reply(9, is_context=True)
    second = world.speak(102, END)
    world.reply(43, after_turn=1)
    third = world.speak(103, END)
    world.reply(5, 6, 41, is_context=True)
    fourth = world.speak(104, END)
    world.reply(done=True, reward=1.0)
    sample = sample_of(group)
    assert [each.token_ids for each in (first, second, third, fourth)] == [
        (5, 6, 41, 42),
        (9,),
        (5, 6, 41, 42, 101, END, 43),
        (5, 6, 41),
    ]
    assert [each.num_before for each in (first, second, third, fourth)] == [2, 4, 6, 8]
    #                                    0  1   2   3    4   5   6    7  8   9   10   11  12   13   14  15
    assert sample.token_ids.tolist() == [5, 6, 100, END, 41, 42, 101, END, 9, 102, END, 43, 103, END, 104, END]
    assert sample.forks == (Fork(4, 1), Fork(8, -1), Fork(11, 7), Fork(14, 4))
    assert sample.context_ids.tolist() == [5, 6, 41, 104, END]
    # The last context was known whole; its turn is apart all the same.
    assert sample.last_turn_ids.tolist() == [104, END]
    assert sample.episode is not None
    assert sample.episode.num_turns == 5
    assert sample.turn_rewards.tolist() == [0.0] * 13 + [1.0]


def test_a_branch_goes_to_the_engine_that_has_its_tokens() -> None:
    """Engine 0 wrote turn 0; busy, it left turn 1 to engine 1, which has the longer path."""
    world, _, _ = begin()
    world.reply()
    world.speak(100, END, engine=0)
    world.reply(41)
    world.speak(101, END, engine=1)
    # Turns that go on from 5 6 100, from the end of turn 1, and from nothing known.
    world.reply(5, 6, 100, 50, is_context=True)
    assert world.speak(102, END, engine=0).engine == 1
    world.reply(43, after_turn=2)
    assert world.speak(103, END, engine=0).engine == 0
    world.reply(44, after_turn=1)
    assert world.speak(104, END, engine=1).engine == 1
    world.reply(9, is_context=True)
    assert world.speak(105, END).engine == 1


def test_a_token_keeps_the_experts_of_the_request_that_first_read_it() -> None:
    """The branches of the test above, the last turn in two requests; request n sends all that it reads to expert n."""
    world, _, group = begin()
    world.reply()
    requests = [world.speak(100, END, expert=1)]
    world.reply(5, 6, 41, 42, is_context=True)
    requests.append(world.speak(101, END, expert=2))
    world.reply(9, is_context=True)
    requests.append(world.speak(102, END, expert=3))
    world.reply(43, after_turn=1)
    requests.append(world.speak(103, END, expert=4))
    world.reply(5, 6, 41, is_context=True)
    # Another engine, or the same one with other weights, goes on.
    requests.append(world.speak(104, 105, reason=FinishReason.ABORT, expert=5))
    requests.append(world.speak(106, END, engine=0, expert=6))
    world.reply(done=True)
    # The request 43 asks for the end of turn 1, which no engine has read before; all of 5 6 41 is known.
    assert [request.num_routed for request in requests] == [0, 2, 0, 5, 3, 4]
    sample = sample_of(group)
    assert sample.routed_experts is not None
    assert sample.routed_experts.shape == (18, 2, 3)
    assert sample.routed_experts[:, 1, 2].tolist() == [1, 1, 1, -1, 2, 2, 2, 4, 3, 3, -1, 4, 4, -1, 5, 6, 6, -1]


def test_each_try_keeps_the_experts_of_its_own_request() -> None:
    """Two tries after the prompt, a turn after the first of them, and two tries after the second."""
    world, source, group = begin(max_tokens=40)
    world.reply(num_tries=2)
    # The second try is done first.
    requests = [world.speak(101, END, expert=2, place=1), world.speak(100, END, expert=1)]
    world.reply(7, after_turn=0)
    requests.append(world.speak(102, END, expert=3))
    world.reply(8, after_turn=1, num_tries=2)
    requests.append(world.speak(103, END, expert=4))
    # A checkpoint has all tries of a turn or none, so the experts of what they read are still to be recorded.
    (saved,) = source.parts([group])
    requests.append(world.speak(104, END, expert=5))
    world.reply(done=True)
    assert [request.num_routed for request in requests] == [0, 0, 3, 3, 3]
    sample = sample_of(group)
    assert sample.token_ids.tolist() == [5, 6, 100, END, 101, END, 7, 102, END, 8, 103, END, 104, END]
    assert sample.routed_experts is not None
    assert saved.routed_experts is not None
    assert sample.routed_experts[:, 1, 2].tolist() == [1, 1, 1, 3, 2, 4, 3, 3, -1, 4, 4, -1, 5, -1]
    assert saved.routed_experts[:, 1, 2].tolist() == [1, 1, 1, 3, 2, -1, 3, 3, -1, -1]
    read = {path.row.token_ids[-2]: path.row.routed_experts for path in paths_of([row_from_sample(sample)])}
    assert {int(token): each[:, 0, 0].tolist() for token, each in read.items() if each is not None} == {
        100: [1, 1, 1, 3],
        101: [1, 1, 2, 4],
        102: [1, 1, 1, 3, 3, 3, -1],
        103: [1, 1, 2, 4, 4, 4, -1],
        104: [1, 1, 2, 4, 4, 5, -1],
    }


def test_a_conversation_that_begins_again_forgets_the_experts_of_its_tokens() -> None:
    world, _, group = begin()
    world.reply()
    world.speak(100, END, expert=1)
    world.reply(7)
    world.speak(101, END, expert=2)
    world.lose(0, owes=True)
    world.reply(is_anew=True)
    assert world.speak(102, END, expert=3).num_routed == 0
    world.reply(done=True)
    sample = sample_of(group)
    assert sample.token_ids.tolist() == [5, 6, 102, END]
    assert sample.routed_experts is not None
    assert sample.routed_experts[:, 0, 0].tolist() == [3, 3, 3, -1]


def test_every_token_counts_in_the_length_of_a_sample_that_forks() -> None:
    world, _, group = begin(plan=replace(PLAN, max_response_tokens=7))
    world.reply()
    world.speak(100, END)
    world.reply(7, 8, 9, is_context=True)
    assert world.speak(101, END).max_tokens == 2
    # Five of seven tokens are new to the sample in both; what is known already costs nothing.
    world.reply(7, 8, 9, 101, END, 10, is_context=True)
    assert sample_of(group).finish_reason is FinishReason.LENGTH


def test_a_path_and_all_branches_have_limits_of_their_own() -> None:
    """With 6 tokens after a prompt of 2 and 9 in all: the root 7 8 9 leaves 4 to the turn, of which 3 are used."""
    world, _, group = begin(plan=replace(PLAN, max_response_tokens=6), max_tokens=9)
    world.reply()
    assert world.speak(100, END).max_tokens == 6
    world.reply(7, 8, is_context=True)
    assert world.speak(101, 102, END).max_tokens == 5
    # The path 7 8 101 102 2 10 has room for 2 more, all branches together for 1.
    world.reply(7, 8, 101, 102, END, 10, is_context=True)
    assert world.speak(END).max_tokens == 1
    world.reply(11, after_turn=0)
    assert sample_of(group).finish_reason is FinishReason.LENGTH


def test_a_turn_that_does_not_train_has_no_loss_token_wherever_it_was_interrupted() -> None:
    world, source, group = begin()
    world.reply()
    world.speak(100, END)
    world.reply(7, trains=False)
    saved = source.parts([group])

    world, _, group = begin(begun=saved)
    world.reply(trains=False)
    world.speak(101, reason=FinishReason.ABORT)
    world.speak(END)
    world.reply(8, num_tries=2, trains=False)
    for token in (102, 103):
        world.speak(token)
    world.reply(9, after_turn=3)
    world.speak(104, END)
    world.reply(done=True, reward=1.0)
    sample = sample_of(group)
    assert sample.token_ids.tolist() == [5, 6, 100, END, 7, 99, 101, END, 8, 102, 103, 9, 104, END]
    read = sample.token_ids[2:][sample.loss_mask]
    assert read.tolist() == [100, END, 104, END]
    assert turn_quantities(sample)["turn"].tolist() == [0, 0, -1, 1, 1, 1, -1, 2, 3, -1, 4, 4]


def test_tries_of_a_turn_are_written_side_by_side_and_stand_in_their_order() -> None:
    """The prompt is 5 6. Turn 0 is tried twice, then turn 2 follows the first try, and turns 3 and 4 the second."""
    world, _, group = begin(max_tokens=40)
    world.reply(num_tries=2)
    assert len({request.seed for request, _ in world.requests}) == 2
    # The second is done first, and goes on at another engine meanwhile.
    requests = [world.speak(102, 103, reason=FinishReason.ABORT, engine=3, place=1)]
    requests += [world.speak(104, reason=FinishReason.LENGTH, place=1), world.speak(100, END)]
    assert [(each.token_ids, each.max_tokens, each.num_before, each.engine) for each in requests] == [
        ((5, 6), 20, 0, None),
        ((5, 6, 102, 103), 18, 2, 3),
        ((5, 6), 20, 0, None),
    ]
    assert requests[0].seed == requests[1].seed
    first = TurnRequest(token_ids=(100, END), turn=0, num_before=2)
    second = TurnRequest(token_ids=(102, 103, 104), turn=1, is_cut=True, num_before=2)
    assert world.acts == [TriesRequest(tries=(first, second))]
    world.reply(7, after_turn=0, rewards={0: 0.5})
    third = world.speak(105, END)
    assert (third.token_ids, third.num_before, third.seed) == ((5, 6, 100, END, 7), 5, requests[2].seed)
    world.reply(8, after_turn=1, num_tries=2)
    for token in (106, 107):
        assert world.speak(token).token_ids == (5, 6, 102, 103, 104, 8)
    world.reply(done=True, reward=1.0, rewards={2: 0.25, 0: 0.5, 3: 2.0})
    sample = sample_of(group)
    #                                    0  1   2   3    4   5   6   7   8   9  10  11   12
    assert sample.token_ids.tolist() == [5, 6, 100, END, 102, 103, 104, 7, 105, END, 8, 106, 107]
    assert sample.forks == (Fork(4, 1), Fork(7, 3), Fork(10, 6), Fork(12, 10))
    assert sample.turn_rewards.tolist() == [0, 1.0, 0, 0, 0, 0, 0, 0.25, 0, 2.0, 1.0]
    assert sample.episode is not None
    assert sample.episode.tries == (Tries(0, 2, -1, (1,)), Tries(2, 1, 0), Tries(3, 2, 1))
    turn, after, first_try = turn_quantities(sample).values()
    assert turn.tolist() == [0, 0, 1, 1, 1, -1, 2, 2, -1, 3, 4]
    assert after.tolist() == [-1, -1, -1, -1, -1, -1, 0, 0, -1, 1, 1]
    assert first_try.tolist() == [0, 0, 0, 0, 0, -1, 2, 2, -1, 3, 3]


def test_turns_of_several_chats_are_written_at_the_same_time_and_stand_in_their_order() -> None:
    """The prompt is 5 6, and turn 0 calls two sub-agents: 5 8 has turn 1, and 5 8 9 turn 2; turn 3 follows turn 1 and
    turn 4 turn 2, which does not train.
    """
    world, _, group = begin(max_tokens=100, max_turns=5)
    world.reply()
    world.speak(100, END)
    helper = EpisodeReply(token_ids=(5, 8, 9), is_context=True, max_turn_tokens=3, stop=("a", "b"))
    world.reply(5, 8, is_context=True, beside=(helper,))
    second, first = world.speak(102, 103, reason=FinishReason.LENGTH, place=1), world.speak(101, END)
    # Of 100 tokens, 2 are written, 8 is read by both, and 9 by the second alone: (100 - 4) // 2 are left to each, and
    # 20 on the path of the first, whose context is as long as the prompt.
    assert [(each.token_ids, each.num_before) for each in (first, second)] == [((5, 8), 2), ((5, 8, 9), 2)]
    assert (first.max_tokens, second.max_tokens) == (20, 3)
    assert (first.sampling.stop, second.sampling.stop) == ((), ("a", "b"))
    assert second.seed == try_seed(first.seed, 1)
    acts = (
        TurnRequest(token_ids=(101, END), turn=1, num_before=2),
        TurnRequest(token_ids=(102, 103), turn=2, is_cut=True, num_before=3),
    )
    assert world.acts[-1] == TriesRequest(tries=acts)
    other = EpisodeReply(token_ids=(11,), after_turn=2, trains=False)
    world.reply(10, after_turn=1, beside=(other,), rewards={1: 0.5})
    assert [world.speak(token, END).token_ids for token in (104, 105)] == [
        (5, 8, 101, END, 10),
        (5, 8, 9, 102, 103, 11),
    ]
    world.reply(done=True, reward=1.0)
    sample = sample_of(group)
    #                                    0  1   2   3   4   5   6   7   8   9   10   11  12  13  14  15  16
    assert sample.token_ids.tolist() == [5, 6, 100, END, 8, 101, END, 9, 102, 103, 10, 104, END, 11, 105, END]
    assert sample.forks == (Fork(4, 0), Fork(7, 4), Fork(10, 6), Fork(13, 9))
    assert sample.token_ids[2:][sample.loss_mask].tolist() == [100, END, 101, END, 102, 103, 104, END]
    assert sample.turn_rewards.tolist() == [0, 0, 0, 0, 0.5, 0, 0, 0, 0, 0, 0, 0, 0, 1.0]
    assert sample.episode is not None
    assert sample.episode.tries == (
        Tries(1, 1, 0),
        Tries(2, 1, 0, (2,), place=1),
        Tries(3, 1, 1),
        Tries(4, 1, 2, place=1),
    )


def test_tries_share_the_room_that_is_left_and_count_as_turns() -> None:
    world, _, group = begin(max_tokens=14, max_turns=4)
    world.reply()
    world.speak(100, END)
    # Of 14 tokens 3 are used, and 11 // 3 are left to each of three tries.
    world.reply(7, num_tries=3)
    assert [world.speak(101).max_tokens for _ in range(3)] == [3, 3, 3]
    world.reply(8, after_turn=1)
    sample = sample_of(group)
    assert (sample.finish_reason, len(world.requests)) == (FinishReason.LENGTH, 0)
    assert sample.response_token_ids.tolist() == [100, END, 7, 101, 101, 101]


def test_tries_repeat_after_a_checkpoint_and_after_the_death_of_a_host() -> None:
    world, source, begun = begin()
    world.reply()
    world.speak(100, END)
    world.reply(7, num_tries=2)
    before = [request for request, _ in world.requests]
    world.speak(101, END)
    # One of two is written.
    (saved,) = source.parts([begun])
    assert saved.response_token_ids.tolist() == [100, END, 7]
    resumed, source, group = begin(begun=[saved])
    assert resumed.started == [StartRequest(prompt=PROMPT, turns=((100, END),))]
    resumed.reply(num_tries=2)
    again = [replace(request, engine=1) for request, _ in resumed.requests]
    assert again == before
    resumed.speak(101, END)
    resumed.speak(102, END)
    (saved,) = source.parts([group])
    assert saved.response_token_ids.tolist() == [100, END, 7, 101, END, 102, END]
    # The reply to both is owed: neither has one.
    resumed.lose(0, owes=True)
    assert resumed.started[1].turns == ((100, END),)
    resumed.reply(num_tries=2)
    assert resumed.acts[-1] == resumed.acts[-2]
    # A second death fails the sample.
    resumed.lose(1, owes=True)
    assert sample_of(group).finish_reason is FinishReason.FAILED
