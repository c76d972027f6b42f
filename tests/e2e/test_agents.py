"""Agents that own their loop drive real vLLM: what trains are the tokens that the engine returned, and nothing else."""

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megarl.cluster.roles import engine_spec
from megarl.config.environments import EnvironmentConfig, EnvironmentEntry
from megarl.config.generation import Sampling
from megarl.data.chat import encode_chats, load_tokenizer
from megarl.environments.worker import WorkerSpec
from megarl.rollout.replay import read_record, record_path
from megarl.rollout.source import SamplingPlan
from megarl.types import FinishReason, Message, Prompt, Sample, SegmentSource, row_from_sample
from megarl.types.forks import path_before
from megarl.types.rows import paths_of
from megarl.types.seeds import try_seed
from megarl_lab.recipes.tiny_model import TinyModelConfig, make_tiny_model
from tests.e2e.agent_run import Outcome, converse
from tests.e2e.support import small_config
from tests.helpers.chat_agent import MAX_TOKENS, NUM_TURNS, STOPS
from tests.helpers.family_parity import load_transformers
from tests.helpers.kill_resume import SmallRun, make_inputs
from tests.helpers.rank_pool import RankPool
from tests.helpers.verifiers_venv import verifiers_command

SIZES = TinyModelConfig(hidden_size=64, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=32, ffn_size=96)
HELPERS = Path(__file__).parents[1] / "helpers"
TOOLS = "{% for tool in tools or [] %}<|im_start|>tools\n{{ tool.function.name }}<|im_end|>\n{% endfor %}"


@pytest.fixture(scope="module")
def talker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_talker(tmp_path_factory.mktemp("agents") / "model", SIZES)


def make_talker(path: Path, sizes: TinyModelConfig) -> Path:
    """Random weights, so that turns are bytes that no text is tokenised to; its template has a place for tools."""
    make_tiny_model(path, sizes, seed=0)
    template = path / "chat_template.jinja"
    template.write_text(TOOLS + template.read_text(encoding="utf-8"), encoding="utf-8")
    return path


def talk_with(process: RankPool, model: Path, arguments: Mapping[str, Any], num_samples: int) -> Outcome:
    """Samples of one prompt, of which the agent knows and the host makes nothing."""
    environment = EnvironmentConfig(
        entries={"mine": EnvironmentEntry(type="agent", arguments=arguments)},
        max_turns=20,
        max_tokens=1000,
        reply_timeout_s=500.0,
    )
    config = small_config(model, "data.max_prompt_tokens=128", "rollout.max_response_tokens=256", "rollout.engine.tp=1")
    host = WorkerSpec(
        model_path=str(model), chat_template={}, names=("mine",), config=environment, max_prompt_tokens=128
    )
    prompt = Prompt(
        uid="a",
        token_ids=(5, 6),
        data_source="d",
        ground_truth="777",
        messages=(Message(role="user", content="37*21=?"),),
        extra_info={"max_tokens": MAX_TOKENS},
        environment="mine",
    )
    plan = SamplingPlan(
        step=1,
        num_samples=num_samples,
        sampling=Sampling(temperature=1.0),
        max_response_tokens=config.rollout.max_response_tokens,
        run_seed=0,
    )
    return process.run(converse, engine_spec(config), host, [prompt], plan, timeout_s=1000.0)[0]


def turns_of(sample: Sample, outcome: Outcome) -> list[list[int]]:
    """The policy's turns; each is what the engine returned when it was asked to go on with all tokens before."""
    # The same tokens may have been asked for several times.
    seeds = [try_seed(sample.seed, index) for index in range(2)]
    returned = [(before, completion) for before, seed, completion in outcome.returned if seed in seeds]
    start, turns = len(sample.prompt_token_ids), []
    for segment in sample.segments[1:]:
        if segment.source is SegmentSource.POLICY:
            before = sample.token_ids[path_before(start, sample.forks)]
            asked, completion = returned.pop(0)
            assert asked == tuple(before.tolist())
            assert segment.token_ids.tolist() == completion.token_ids.tolist()
            assert segment.rollout_logprobs is not None
            assert np.array_equal(segment.rollout_logprobs, completion.logprobs)
            assert segment.loss_mask.all()
            turns.append(segment.token_ids.tolist())
        else:
            assert segment.source is SegmentSource.ENVIRONMENT
            assert not segment.loss_mask.any()
        start += len(segment.token_ids)
    assert not returned
    return turns


def test_an_openai_client_trains_on_what_the_engine_returned(engine_process: RankPool, talker: Path) -> None:
    outcome = talk_with(engine_process, talker, {"agent": f"{HELPERS / 'chat_agent.py'}:ask_often"}, num_samples=6)
    tokenizer = load_tokenizer(talker)
    chat = [Message(role="system", content="Be brief."), Message(role="user", content="37*21=?")]
    num_unlike, num_stopped = 0, 0
    for sample in outcome.samples:
        assert sample.episode is not None
        assert (sample.finish_reason, sample.episode.reason) == (FinishReason.STOP, "")
        assert sample.prompt_token_ids.tolist() == encode_chats(tokenizer, [chat])[0]
        turns = turns_of(sample, outcome)
        texts = [tokenizer.decode(turn, skip_special_tokens=True) for turn in turns]
        # Of a turn that a text ended the agent gets what is before, and all that the engine returned trains.
        assert not {*STOPS} & {*tokenizer.decode(turns[1][:-1], skip_special_tokens=True)}
        seen = [texts[0], re.split("[a-p]", texts[1])[0], *texts[2:]]
        num_stopped += seen != texts
        assert sample.episode.details["texts"] == seen
        assert len(turns) == NUM_TURNS
        assert max(map(len, turns)) <= MAX_TOKENS
        for i, turn in enumerate(turns):
            again = tokenizer(texts[i], add_special_tokens=False)["input_ids"]
            num_unlike += again != [token for token in turn if token not in tokenizer.all_special_ids]
        assert sample.segments[-1].reward == len(texts[-1]) % 3
    # Tokenised again, the texts would be other tokens.
    assert num_unlike > 0
    assert num_stopped > 0


def test_every_branch_of_a_conversation_was_sampled_as_it_trains(engine_process: RankPool, talker: Path) -> None:
    """The log-probs by transformers of every path, against the engine's."""
    outcome = talk_with(engine_process, talker, {"agent": f"{HELPERS / 'chat_agent.py'}:rewrite"}, num_samples=4)
    hf, num_labels = load_transformers(talker), 0
    for sample in outcome.samples:
        assert sample.episode is not None
        assert (sample.finish_reason, sample.episode.reason) == (FinishReason.STOP, "")
        turns = turns_of(sample, outcome)
        assert len(turns) == 10
        # Tries are not the same.
        assert turns[7] != turns[8]
        # A helper, another one whose prompt begins alike, the first chat once more, a shorter one, back again, another
        # try, and back to the first try.
        assert len(sample.forks) == 7
        within = [fork.after < len(sample.prompt_token_ids) - 1 for fork in sample.forks]
        assert within == [True] + [False] * 6
        assert sample.turn_rewards[sample.turn_rewards > 0].tolist() == [0.25, 0.5, 1.0]
        row = row_from_sample(sample)
        for path in paths_of([row]):
            ids = torch.from_numpy(path.row.token_ids).long()
            logprobs = hf(ids[None]).logits[0].log_softmax(-1)[:-1].gather(1, ids[1:, None])[:, 0]
            kept = np.flatnonzero(path.row.loss_mask)
            expected = logprobs.detach().numpy()[path.row.num_prompt_tokens - 1 + kept]
            assert np.abs(expected - row.quantities["rollout_logprobs"][path.columns[kept]]).max() < 1e-4
            num_labels += len(kept)
        assert row.num_loss_tokens == sum(map(len, turns))
    assert num_labels == sum(row_from_sample(sample).num_loss_tokens for sample in outcome.samples)


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_verifiers_trains_with_contexts_that_it_compacts(tmp_path: Path) -> None:
    """A whole run of two steps, at whose ends no sample had failed; log-probs of trainer and engine agree."""
    inputs = make_inputs(tmp_path)
    make_talker(tmp_path / "model", replace(SIZES, max_positions=4096))
    command = json.dumps(verifiers_command(summarize_at_tokens=1))
    run = SmallRun(
        inputs=inputs,
        name="verifiers",
        settings=(
            f"environment.entries={{mine: {{type: agent, arguments: {{command: {command}}}}}}}",
            *("environment.default=mine", "environment.max_tokens=6000", "environment.reply_timeout_s=300"),
            *("rollout.max_response_tokens=2048", "rollout.num_samples=2", "rollout.record=true", "data.val=[]"),
            *("trainer.prompts_per_step=1", "trainer.total_steps=2", "rewards.manager=environment"),
            "actor.optimizer.warmup_steps=0",
        ),
    )
    assert run.start().wait() == 0, run.paths.root.with_suffix(".log").read_text()
    tokenizer = load_tokenizer(tmp_path / "model")
    for record in run.records():
        assert record.metrics["environment/raised"] == record.metrics["environment/timed_out"] == 0
        assert 0 < record.metrics["mismatch/abs_max"] <= 1e-4
        samples = read_record(record_path(run.paths.records, record.step)).samples
        assert len(samples) == 2
        for sample in samples:
            assert sample.episode is not None
            assert (sample.finish_reason, sample.episode.reason) == (FinishReason.STOP, "")
            assert sample.episode.details["errors"] == []
            given = [tokenizer.decode(s.token_ids) for s in sample.segments if s.source is SegmentSource.ENVIRONMENT]
            num_compacted = sum("CONTEXT CHECKPOINT COMPACTION" in text for text in given)
            assert 0 < num_compacted <= len(sample.forks)


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_verifiers_trains_on_what_the_engine_returned(engine_process: RankPool, talker: Path) -> None:
    """Its harness goes through a server of its own; its user asks twice after the first answer."""
    command = verifiers_command()
    outcome = talk_with(engine_process, talker, {"command": command}, num_samples=2)
    tokenizer = load_tokenizer(talker)
    for sample in outcome.samples:
        assert sample.episode is not None
        assert (sample.finish_reason, sample.episode.reason) == (FinishReason.STOP, "")
        opening = tokenizer.decode(sample.prompt_token_ids)
        assert opening.startswith(
            "<|im_start|>tools\nmultiplier_multiply<|im_end|>\n<|im_start|>user\n37*21=?<|im_end|>"
        )
        texts = [tokenizer.decode(turn, skip_special_tokens=True).strip() for turn in turns_of(sample, outcome)]
        assert sample.episode.details["texts"] == texts
        assert sample.episode.details["errors"] == []
        assert len(texts) == 3
