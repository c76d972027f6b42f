"""A teacher behind servers: what is asked, how answers are read, and what is said if there are none."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from megarl.config.teacher import TeacherConfig
from megarl.errors import ConfigError, RunError
from megarl.train.served_teacher import ServedTeacher
from megarl.types import Row
from megarl.types.forks import Fork
from tests.helpers.reward_server import RewardServer, reply

ROW = Row(
    uid="a",
    sample_index=0,
    token_ids=np.array([7, 8, 3, 4, 5]),
    num_prompt_tokens=2,
    loss_mask=np.array([True, False, True]),
)
# vLLM's form: nothing before the first token, then the likeliest tokens and the token itself, with their ranks.
GIVEN: list[Any] = [
    None,
    {"8": {"logprob": -1.0, "rank": 1}},
    {"9": {"logprob": -0.5, "rank": 1}, "2": {"logprob": -1.5, "rank": 2}, "3": {"logprob": -4.0, "rank": 9}},
    {"4": {"logprob": -0.1, "rank": 1}, "1": {"logprob": -3.0, "rank": 2}},
    {"1": {"logprob": -2.0, "rank": 2}, "5": {"logprob": -0.25, "rank": 1}},
]


def asked(
    server: RewardServer, *, top_k: int | None, common: int | None = None, num_rows: int = 10, **settings: Any
) -> ServedTeacher:
    cfg = TeacherConfig(model_path="t", servers=(server.url.replace("/get_reward", "/v1"),), **settings)
    return ServedTeacher(cfg, key="teacher", top_k=top_k, common=common, num_rows=num_rows)


def test_a_row_is_a_prompt_whose_log_probs_are_read_by_place() -> None:
    with RewardServer(lambda body: reply(choices=[{"text": "", "prompt_logprobs": GIVEN}])) as server:
        found = asked(server, top_k=2, served_name="big").forward([ROW, ROW], step=1)
    body = server.requests[0]
    assert (body["model"], body["prompt"], body["prompt_logprobs"]) == ("big", [7, 8, 3, 4, 5], 2)
    assert body["temperature"] == 1.0
    np.testing.assert_array_equal(found["logprobs"][0], np.array([-4.0, 0.0, -0.25], np.float32))
    np.testing.assert_array_equal(found["top_ids"][1], [[9, 2], [-1, -1], [5, 1]])
    np.testing.assert_array_equal(found["top_logprobs"][1][[0, 2]], np.array([[-0.5, -1.5], [-0.25, -2.0]], np.float32))


@pytest.mark.parametrize(
    ("top_k", "common", "num_rows", "asked_for"), [(2, None, 9, 2), (2, 9, 10, 2), (None, 9, 10, 20)]
)
def test_what_the_policy_lacks_is_left_out(
    top_k: int | None, common: int | None, num_rows: int, asked_for: int
) -> None:
    """Token 9, which the policy has not, has e^−0.5 of the first label's distribution; the others share the rest."""
    with RewardServer(lambda body: reply(choices=[{"text": "", "prompt_logprobs": GIVEN}])) as server:
        found = asked(server, top_k=top_k, common=common, num_rows=num_rows).forward([ROW], step=1)
    assert server.requests[0]["prompt_logprobs"] == asked_for
    rest = np.log(1 - np.exp(-0.5))
    np.testing.assert_allclose(found["logprobs"][0], [-4.0 - rest, 0.0, -0.25], rtol=1e-6)
    if top_k:
        np.testing.assert_array_equal(found["top_ids"][0], [[2, -1], [-1, -1], [5, 1]])
        np.testing.assert_allclose(found["top_logprobs"][0][0], [-1.5 - rest, -np.inf], rtol=1e-6)


def test_each_path_of_a_row_that_forks_is_a_prompt() -> None:
    """The last token follows the prompt, not the one before it."""
    branch = [None, {"8": {"logprob": -1.0, "rank": 1}}, {"5": {"logprob": -0.75, "rank": 1}}]

    def answer(body: Any) -> Any:
        return reply(choices=[{"text": "", "prompt_logprobs": branch if body["prompt"] == [7, 8, 5] else GIVEN[:4]}])

    with RewardServer(answer) as server:
        found = asked(server, top_k=2).forward([replace(ROW, forks=(Fork(4, 1),))], step=1)
    assert sorted(body["prompt"] for body in server.requests) == [[7, 8, 3, 4], [7, 8, 5]]
    np.testing.assert_array_equal(found["logprobs"][0], np.array([-4.0, 0.0, -0.75], np.float32))
    np.testing.assert_array_equal(found["top_ids"][0], [[9, 2], [-1, -1], [5, -1]])


def test_a_server_without_log_probs_of_prompts_ends_the_run_with_the_remedy() -> None:
    refusal = r"teacher\.servers: no answer for row a/0 in 3 tries, .* got none, expected"
    with RewardServer(lambda body: reply(choices=[{"text": ""}])) as server, pytest.raises(RunError, match=refusal):
        asked(server, top_k=None).forward([ROW], step=1)
    assert server.requests[0]["prompt_logprobs"] == 0


def test_a_key_that_is_not_there_is_refused_at_the_start() -> None:
    cfg = TeacherConfig(model_path="t", servers=("http://host/v1",), api_key_env="NO_SUCH_KEY_ANYWHERE")
    with pytest.raises(ConfigError, match=r"teacher\.api_key_env: NO_SUCH_KEY_ANYWHERE is not set"):
        ServedTeacher(cfg, key="teacher", top_k=None)
