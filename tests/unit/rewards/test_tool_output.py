"""An answer that only a tool's output states scores nothing: real inter-turn tokens, real rules, real functions of
users.
"""

from collections.abc import Iterator
from contextlib import closing

import pytest

from megarl.config.load import from_dict
from megarl.config.rewards import RewardsConfig
from megarl.data.chat import encode_chats
from megarl.data.turns import InterTurnTokens
from megarl.rewards.build import open_rewards
from megarl.rewards.manager import RewardManager
from megarl.types import Episode, FinishReason, Message, Prompt, Sample, environment_segment, prompt_segment
from megarl_lab.recipes.tiny_model import make_byte_tokenizer
from tests.helpers.segments import policy_segment

TOKENIZER = make_byte_tokenizer()
END = TOKENIZER.eos_token_id
QUESTION = Message(role="user", content="37*48=?")
PROMPT_IDS = tuple(encode_chats(TOKENIZER, [[QUESTION]])[0])
# Functions in two conventions; that of `by_tokens` gets token ids, of which it looks for those of the answer.
FUNCTIONS = """
def compute_score(data_source, solution_str, ground_truth, extra_info):
    return float(ground_truth in solution_str)

def by_tokens(completions, completion_ids, **kwargs):
    answer = {ids}
    return [float(answer in [ids[i:i + len(answer)] for i in range(len(ids))]) for ids in completion_ids]
"""


def ids_of(text: str) -> list[int]:
    encoded: list[int] = TOKENIZER(text, add_special_tokens=False)["input_ids"]
    return encoded


def conversation(index: int, last: str) -> Sample:
    """A call, a reply that states the answer in every form that a rule may look for, and a last turn."""
    reply = Message(role="tool", content="1776\n#### 1776\n\\boxed{1776}")
    call = [*ids_of("calc 37*48"), END]
    glue = InterTurnTokens(TOKENIZER).between([reply], last_token=END)
    return Sample(
        uid="a",
        sample_index=index,
        seed=0,
        segments=(
            prompt_segment(PROMPT_IDS),
            policy_segment(call),
            environment_segment(glue),
            policy_segment([*ids_of(last), END]),
        ),
        finish_reason=FinishReason.STOP,
        episode=Episode(environment="calculator", num_turns=2),
    )


SCORERS = ("megarl/calculator", "math", "math/last_number")
OWN = ("compute_score", "by_tokens")


@pytest.fixture(scope="module")
def manager(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RewardManager]:
    """A source for each scorer and each function."""
    path = tmp_path_factory.mktemp("own") / "mine.py"
    path.write_text(FUNCTIONS.format(ids=ids_of("1776")))
    functions = {name: {"path": str(path), "name": name, "sources": [name]} for name in OWN}
    sources = {f"of {name}": {"scorer": name} for name in SCORERS}
    tree = {"sources": sources, "custom": {"functions": functions, "workers": 1}, "verifier": {"workers": 1}}
    with closing(open_rewards(from_dict(RewardsConfig, tree), {*sources, *OWN}, TOKENIZER)) as opened:
        yield opened


@pytest.mark.parametrize("source", [*(f"of {name}" for name in SCORERS), *OWN])
def test_only_the_policys_own_answer_scores(manager: RewardManager, source: str) -> None:
    prompt = Prompt(
        uid="a",
        token_ids=PROMPT_IDS,
        data_source=source,
        ground_truth="1776",
        messages=(QUESTION,),
        environment="calculator",
    )
    own = "\\boxed{1776}" if source == "of math" else "#### 1776"
    samples = [conversation(0, "I do not know."), conversation(1, own), conversation(2, "calc 37*4")]
    judging = manager.begin()
    for sample in samples:
        judging.add(prompt, sample)
    judged = manager.finish([judging], samples)
    assert [reward.score for reward in judged.rewards] == [0.0, 1.0, 0.0]
    assert [reward.correct for reward in judged.rewards] == [False, True, False]
