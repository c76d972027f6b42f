"""OpenRLHF's format: what is sent, what is taken for an answer, and what a service takes for a request."""

import json
from dataclasses import asdict
from typing import Any

import numpy as np
import pytest

from megarl.rewards.question import Question
from megarl.rewards.serve import BadRequestError, decode_request
from megarl.rewards.wire import BadReplyError, decode_reply, encode_request
from megarl.types import Reward
from tests.helpers.reward_items import item

ITEMS = [item("1+1=", "2", "2", extra_info={"index": 3}), item("2+2=", "5", "4", extra_info={"index": 3})]


def test_what_is_sent() -> None:
    assert encode_request(ITEMS) == {
        "query": ["1+1=2", "2+2=5"],
        "prompts": ["1+1=", "2+2="],
        "labels": ["2", "4"],
        "data_source": ["d", "d"],
        "extra_info": [{"index": 3}, {"index": 3}],
    }


def test_a_service_reads_what_is_sent() -> None:
    got = decode_request(json.loads(json.dumps(encode_request(ITEMS))), None)
    assert [asdict(each) for each in got] == [
        asdict(
            Question(
                data_source="d", prompt=prompt, response=response, ground_truth=truth, extra_info=extra, group=prompt
            )
        )
        for prompt, response, truth, extra in (("1+1=", "2", "2", {"index": 3}), ("2+2=", "5", "4", {"index": 3}))
    ]


def test_what_openrlhf_sends_has_neither_source_nor_extra_info() -> None:
    body = {"query": ["aa"], "prompts": ["a"], "labels": ["1"]}
    # The prompt is taken away once, from the front.
    assert [asdict(each) for each in decode_request(body, "gpqa")] == [
        asdict(Question(data_source="gpqa", prompt="a", response="a", ground_truth="1", group="a"))
    ]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ([], "got no object"),
        ({"query": ["a"], "prompts": ["a"]}, "labels: expected a list of strings"),
        ({"query": ["a"], "prompts": ["a"], "labels": [1]}, "labels: expected a list of strings"),
        ({"query": ["a"], "prompts": ["a"], "labels": []}, "labels: got 0 rows, expected 1"),
        ({"query": ["ab"], "prompts": ["b"], "labels": ["1"]}, r"query\[0\]: does not start with prompts\[0\]"),
        ({"query": ["a"], "prompts": ["a"], "labels": ["1"], "extra_info": [3]}, "extra_info: expected a list"),
        ({"query": ["a"], "prompts": ["a"], "labels": ["1"]}, "data_source: is missing"),
    ],
)
def test_bad_requests(body: Any, message: str) -> None:
    with pytest.raises(BadRequestError, match=message):
        decode_request(body, None)


def test_answers() -> None:
    reply = decode_reply({"rewards": [0.5, -1], "extra_logs": {"length": [3, 4], "load": 0.5}}, 2)
    # Without scores a reward above 0 is correct.
    assert reply.reward(0) == Reward(score=0.5, correct=True, details={"length": 3.0, "load": 0.5})
    assert reply.reward(1) == Reward(score=-1.0, correct=False, details={"length": 4.0, "load": 0.5})


def test_what_is_no_number_is_a_note() -> None:
    logs = {"length": [3, 4], "pred": ["4", None], "share": [0.5, float("nan")], "by": "rules"}
    reply = decode_reply({"rewards": [0.5, -1], "extra_logs": logs}, 2)
    assert reply.reward(1).details == {"length": 4.0}
    assert reply.reward(1).notes == {"pred": None, "share": "nan", "by": "rules"}


def test_null_among_numbers_is_no_opinion() -> None:
    logs = {"style": [0.5, None], "length": [None, None], "unjudged": [None, None]}
    reply = decode_reply({"rewards": [0.5, -1], "extra_logs": logs}, 2)
    assert reply.reward(0).details == {"style": 0.5}
    assert reply.reward(0).no_opinion == ("length",)
    assert reply.reward(1).details == {}
    assert reply.reward(1).no_opinion == ("style", "length")


def test_scores_say_what_is_correct() -> None:
    reply = decode_reply({"rewards": [-0.2, 0.9], "scores": [1.0, 0.0], "extra_logs": None}, 2)
    assert [reply.reward(row).correct for row in range(2)] == [True, False]
    assert [reply.reward(row).own_score for row in range(2)] == [1.0, 0.0]


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        ([1.0, 2.0], r"got \[1.0, 2.0\], expected an object with rewards"),
        ({"reward": [1.0, 2.0]}, r"got keys \['reward'\], expected rewards"),
        ({"rewards": 1.0}, "rewards: got 1.0, expected a list of 2 numbers"),
        ({"rewards": [1.0]}, "rewards: got 1 numbers, expected 2, one per row"),
        ({"rewards": [1.0, 2.0, 3.0]}, "rewards: got 3 numbers, expected 2"),
        ({"rewards": [1.0, "2.0"]}, r"rewards\[1\]: got '2.0', expected a finite number"),
        ({"rewards": [1.0, None]}, r"rewards\[1\]: got None"),
        ({"rewards": [[1.0], [2.0]]}, r"rewards\[0\]: got \[1.0\]"),
        ({"rewards": [True, 1.0]}, r"rewards\[0\]: got True"),
        ({"rewards": [1.0, float("nan")]}, r"rewards\[1\]: got nan"),
        ({"rewards": [float("-inf"), 0.0]}, r"rewards\[0\]: got -inf"),
        ({"rewards": [10**400, 0.0]}, r"rewards\[0\]: got 1000"),
        ({"rewards": [1.0, 0.0], "scores": [1.0, None]}, r"scores\[1\]: got None"),
        ({"rewards": [1.0, 0.0], "scores": [1.0]}, "scores: got 1 numbers"),
        ({"rewards": [1.0, 0.0], "extra_logs": {"x": [1.0]}}, r"extra_logs.x: got 1 values, expected 2, one per row"),
        ({"rewards": [1.0, 0.0], "extra_logs": [1.0]}, "extra_logs: got"),
        ({"rewards": [1.0, 0.0], "no_opinion": "a"}, "no_opinion: got 'a', expected a list of names"),
    ],
)
def test_bad_answers(reply: Any, message: str) -> None:
    with pytest.raises(BadReplyError, match=message):
        decode_reply(reply, 2)


def test_numbers_of_numpy_are_no_json() -> None:
    with pytest.raises(BadReplyError, match=r"rewards\[0\]"):
        decode_reply({"rewards": [np.int64(1)]}, 1)
