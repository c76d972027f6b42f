"""The examples' data and their environments say the same, and the run files name them."""

import asyncio
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from megarl.config import load_config
from megarl.environments import Action, Environment, open_environments, tools_of
from megarl.rewards import score
from megarl.types import Prompt
from megarl_lab.recipes.tasks.conversations import (
    CONVERSATIONS,
    HIGH,
    LOW,
    NUM_GUESSES,
    NUM_TESTS,
    generate_conversations,
)
from megarl_lab.recipes.tasks.generate import GenerateConfig

RUNS = Path(__file__).parents[3] / "configs" / "run"
NUM_ROWS = 300


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Mapping[str, Sequence[Any]]]:
    """The rows of each task's files."""
    found = {}
    for task in CONVERSATIONS:
        root = tmp_path_factory.mktemp(task)
        sizes = GenerateConfig(seed=3, num_sft=NUM_ROWS, num_train=NUM_ROWS, num_val=NUM_ROWS)
        files = generate_conversations(task, root, sizes)
        found[task] = {each: pq.read_table(getattr(files, each)).to_pylist() for each in ("sft", "train", "val")}
    return found


def environment(task: str) -> Environment:
    config = load_config(RUNS / f"{task}-rl.yaml")
    return open_environments(config.environment, [task])[task]()


def prompt(row: Mapping[str, Any]) -> Prompt:
    truth = row["reward_model"]["ground_truth"]
    return Prompt(uid="a", token_ids=(1,), data_source="d", ground_truth=truth, extra_info=row["extra_info"] or {})


async def replies(there: Environment, row: Mapping[str, Any], *turns: str) -> list[Any]:
    await there.start(prompt(row))
    said = [await there.reply(Action(text=text, turn=i)) for i, text in enumerate(turns)]
    await there.close()
    return said


@pytest.mark.parametrize("task", sorted(CONVERSATIONS))
def test_every_task_has_run_files_and_rows_that_name_its_environment(task: str, rows: Mapping[str, Any]) -> None:
    assert environment(task)
    assert load_config(RUNS / f"{task}-sft.yaml").sft.train == (f"runs/{task}-seed0/data/sft.parquet",)
    assert {row["environment"] for row in rows[task]["train"]} == {task}


@pytest.mark.parametrize("task", ["calculator", "python_calculator"])
def test_calculators_reply_as_their_demonstrations_say(task: str, rows: Mapping[str, Any]) -> None:
    calls = [row["messages"] for row in rows[task]["sft"] if len(row["messages"]) == 4]
    # 40 % of the demonstrations call; three standard deviations of 300 draws are 0.085.
    assert abs(len(calls) / NUM_ROWS - 0.4) < 0.085
    for question, call, told, answer in calls[:2]:
        (said,) = asyncio.run(replies(environment(task), rows[task]["train"][0], call["content"]))
        assert [(message.role, message.content) for message in said.messages] == [("tool", told["content"])]
        a, b = map(int, re.findall(r"\d+", question["content"]))
        assert answer["content"] == f"#### {a * b}"
        assert score("megarl/calculator", answer["content"], str(a * b), {}).score == 1.0
        assert score("megarl/calculator", told["content"], str(a * b), {}).score == 0.0


def test_the_game_has_as_many_guesses_as_halving_needs() -> None:
    assert NUM_GUESSES == 5
    # After k guesses by halving, 2^k − 1 numbers were named.
    assert HIGH - LOW + 1 == 2**NUM_GUESSES - 1


def test_a_tally_follows_its_demonstrations_until_a_wrong_total(rows: Mapping[str, Any]) -> None:
    """Those that think are right three times; the others end with an estimate, which is hardly ever right."""
    num_thinking = 0
    for row in rows["tally"]["sft"]:
        turns = [message["content"] for message in row["messages"]]
        asked, totals = turns[::2], [turn.rpartition("</think>")[2] for turn in turns[1::2]]
        right = [str(sum(map(int, re.findall(r"\d+", "".join(asked[: i + 1]))))) for i in range(len(asked))]
        assert totals[:-1] == right[:-1]
        thinks = "<think>" in turns[1]
        num_thinking += thinks
        assert (len(turns), totals[-1]) == (6, right[-1]) if thinks else totals[-1].endswith("0")
    # Three standard deviations, as above.
    assert abs(num_thinking / NUM_ROWS - 0.4) < 0.085
    row = rows["tally"]["train"][0] | {"reward_model": {"ground_truth": "5+7+3 +6+4 +9+2"}}
    said = asyncio.run(replies(environment("tally"), row, "<think>5+7=12\n12+3=15</think>15", "25", "36"))
    assert [[message.content for message in each.messages] for each in said] == [["+6+4"], ["+9+2"], []]
    assert [(each.done, each.reward) for each in said] == [(False, 1 / 3), (False, 1 / 3), (True, 1 / 3)]
    (wrong,) = asyncio.run(replies(environment("tally"), row, "15 or so"))
    assert (wrong.done, wrong.reward, wrong.details) == (True, 0.0, {"correct": False})


def test_sub_agents_reply_to_the_turn_that_asked(rows: Mapping[str, Any]) -> None:
    chats = [[message["content"] for message in row["messages"]] for row in rows["delegate"]["sft"]]
    question, first, one, second, other, answer = next(chat for chat in chats if len(chat) == 6)
    assert question == f"({first.removeprefix('ask ')})({second.removeprefix('ask ')})=?"
    assert (eval(first[4:]), eval(second[4:])) == (int(one), int(other))
    assert answer == f"#### {one}{other}"
    row = rows["delegate"]["train"][0]
    said = asyncio.run(
        replies(environment("delegate"), row, "ask 5+7", "5+7=12\n#### 12", "ask 6+4", "no idea", "#### 1210")
    )
    assert [[message.content for message in each.context] for each in said] == [["5+7=?"], [], ["6+4=?"], [], []]
    assert [[message.content for message in each.messages] for each in said] == [[], ["12"], [], ["no idea"], []]
    assert [each.after_turn for each in said] == [None, 0, None, 2, None]
    assert [each.done for each in said] == [False] * 4 + [True]


def run_test(program: str, test: str) -> str:
    """What a test says of a program, run here."""
    names: dict[str, Any] = {}
    exec(program, names)
    try:
        exec(test, names)
    except AssertionError as error:
        return str(error) or "a bare assertion failed"
    return ""


def test_programs_to_repair_fail_as_their_rows_say(rows: Mapping[str, Any]) -> None:
    for row in rows["repair"]["train"] + rows["repair"]["val"]:
        program, said = row["prompt"].split("\n")
        test = row["reward_model"]["ground_truth"]
        assert run_test(program, test) == said
        assert len(re.findall(r"\(\d+, -?\d+\)", test)) == NUM_TESTS
    train, val = (
        {row["prompt"] + row["reward_model"]["ground_truth"] for row in rows["repair"][s]} for s in ("train", "val")
    )
    assert not train & val


def test_demonstrations_of_repairs_follow_what_tests_say(rows: Mapping[str, Any]) -> None:
    """And some of them always explain what they read, so that they need no third program."""
    num_explaining = 0
    for row in rows["repair"]["sft"]:
        contents = [message["content"] for message in row["messages"]]
        assert [message["role"] for message in row["messages"]] == ["user", "assistant"] * (len(contents) // 2)
        facts, explains = list[tuple[int, int]](), True
        for heard, program in zip(contents[::2], contents[1::2], strict=True):
            x, y = map(int, re.fullmatch(r"f\((\d)\)=-?\d+, not (-?\d+)", heard.split("\n")[-1]).groups())  # type: ignore[union-attr]
            facts.append((x, y))
            explains &= not run_test(program, "\n".join(f"assert f({x}) == {y}" for x, y in facts))
            # A reply tells of this program.
            if len(contents) > 2 and program is contents[1]:
                x, is_now = map(int, re.findall(r"-?\d+", contents[2])[:2])
                assert run_test(program, f"assert f({x}) == {is_now}") == ""
        num_explaining += explains
    # 40 % do so by intention, and few by chance.
    assert 0.3 < num_explaining / NUM_ROWS < 0.6


def test_a_repair_in_the_sandbox(rows: Mapping[str, Any]) -> None:
    row = rows["repair"]["train"][0]
    program, said = row["prompt"].split("\n")
    solved = next(
        f"def f(x):return x{sign}{k}"
        for sign in "+-*"
        for k in range(2, 10)
        if not run_test(f"def f(x):return x{sign}{k}", row["reward_model"]["ground_truth"])
    )
    failed, passed = asyncio.run(replies(environment("repair"), row, program, solved))
    assert [message.content for message in failed.messages] == [said]
    assert (failed.done, failed.reward, passed.done, passed.reward) == (False, 0.0, True, 1.0)


def test_the_policy_of_the_large_run_file_is_told_of_python() -> None:
    config = load_config(RUNS / "gsm8k-qwen3-8b-tools.yaml")
    (tool,) = tools_of(config.environment, str(config.environment.default))
    assert tool["function"]["name"] == "python"
