"""`megarl eval` of a model directory, and of a checkpoint that ranks load and send to the engine."""

import os
import re
import signal
import statistics
from collections import defaultdict
from math import comb, sqrt
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from megarl.rewards import score
from megarl_lab.recipes.tasks import TASKS
from megarl_lab.recipes.tasks.generate import GenerateConfig, TaskFiles, generate
from tests.e2e import cli_run
from tests.e2e.cli_run import leftovers, run_to_end
from tests.e2e.support import SFT_FILE, SMALL
from tests.helpers.checkpoints import make_checkpoint
from tests.helpers.talk import talk_settings

NUM_SAMPLES, MAX_TOKENS = 4, 24


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> list[TaskFiles]:
    """Two data sources."""
    sizes = GenerateConfig(seed=0, num_sft=64, num_train=1, num_val=6)
    return [generate(TASKS.get(name), tmp_path_factory.mktemp(name), sizes) for name in ("sums", "countdown")]


def evaluate(model: Path, out: Path, data: list[TaskFiles], *arguments: str, max_tokens: int = MAX_TOKENS) -> str:
    files = [str(files.val) for files in data]
    options = ["--num-samples", str(NUM_SAMPLES), "--k", "1", "3", "--max-response-tokens", str(max_tokens)]
    settings = ["data.max_prompt_tokens=128", "rollout.engine.max_num_seqs=16", *arguments]
    return run_to_end(out, "eval", str(model), *settings, "--data", *files, *options, "--out", str(out))


def rows(path: Path) -> list[dict[str, Any]]:
    return pq.read_table(path).to_pylist()


def test_a_model_directory(tmp_path: Path, data: list[TaskFiles]) -> None:
    model, out = make_checkpoint(tmp_path / "model", tied=True), tmp_path / "out"
    stdout = evaluate(model, out, data)
    answers, table = rows(out / "samples.parquet"), rows(out / "table.parquet")
    # Six prompts of each source, each with a greedy answer and four sampled ones.
    assert len(answers) == 2 * 6 * (1 + NUM_SAMPLES)
    check_table(table, answers)
    # On a slow machine, lines that say how long it works come between.
    words = [line.split() for line in stdout.splitlines()]
    sources = [each[1] for each in words if len(each) > 1 and each[1].startswith("megarl/")]
    assert sources[-2:] == ["megarl/countdown", "megarl/sums"]
    assert f"eval {len(answers)}/{len(answers)}" in stdout
    assert "tok/s" in stdout
    assert (out / "config.yaml").is_file()
    check_greedy_answers_against_transformers(model, answers)


@pytest.mark.long
def test_conversations(tmp_path: Path, data: list[TaskFiles]) -> None:
    """Every answer is judged by its last turn, and its turns are written beside it."""
    model, out = make_checkpoint(tmp_path / "model", tied=True), tmp_path / "out"
    talk = (*talk_settings(), "environment.max_turn_tokens=16")
    stdout = evaluate(model, out, data[:1], *talk, "environment.max_turns=3", max_tokens=128)
    answers, (row,) = rows(out / "samples.parquet"), rows(out / "table.parquet")
    assert len(answers) == 6 * (1 + NUM_SAMPLES)
    assert row["pass_at_3"] >= row["pass_at_1"] == pytest.approx(row["avg"])
    authors = [[turn["author"] for turn in answer["turns"]] for answer in answers]
    assert all(each == ["policy", "environment", "policy", "environment", "policy"] for each in authors)
    for answer in answers:
        turns = answer["turns"]
        assert "".join(turn["text"] for turn in turns) == answer["response"]
        # The environment counted the characters of the turn before, without special tokens.
        assert re.search(r"tool\n\d+!<\|im_end\|>", turns[1]["text"])
        again = score(answer["data_source"], turns[-1]["text"].removesuffix("<|im_end|>"), answer["ground_truth"], {})
        assert (again.score, again.correct) == (answer["reward"], answer["correct"])
        assert answer["num_calls"] == 3
    (line,) = (line for line in stdout.splitlines() if "megarl/sums" in line and "±" in line)
    assert line.split()[-2:] == ["3.00", "3.00"]


def check_table(table: list[dict[str, Any]], answers: list[dict[str, Any]]) -> None:
    """Judge every answer again, and compute the estimates from the definition."""
    assert [row["data_source"] for row in table] == ["megarl/countdown", "megarl/sums"]
    for row in table:
        groups: dict[str, list[bool]] = defaultdict(list)
        for answer in answers:
            if answer["data_source"] != row["data_source"]:
                continue
            text = answer["response"].removesuffix("<|im_end|>")
            again = score(answer["data_source"], text, answer["ground_truth"], {})
            assert (again.score, again.correct) == (answer["reward"], answer["correct"])
            if not answer["greedy"]:
                groups[answer["uid"]].append(answer["correct"])
        shares = [sum(group) / NUM_SAMPLES for group in groups.values()]
        assert (row["num_prompts"], row["num_samples"]) == (6, NUM_SAMPLES)
        assert row["avg"] == pytest.approx(statistics.fmean(shares))
        assert row["avg_std_error"] == pytest.approx(statistics.stdev(shares) / sqrt(6))
        missed = [comb(group.count(False), 3) / comb(NUM_SAMPLES, 3) for group in groups.values()]
        assert row["pass_at_3"] == pytest.approx(1 - statistics.fmean(missed))
        assert row["pass_at_1"] == pytest.approx(row["avg"])


def check_greedy_answers_against_transformers(model: Path, answers: list[dict[str, Any]]) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model)
    hf = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    greedy = [answer for answer in answers if answer["greedy"]]
    assert len(greedy) == 12
    for answer in greedy:
        ids = tokenizer(answer["prompt"], add_special_tokens=False, return_tensors="pt")["input_ids"]
        written = hf.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=MAX_TOKENS)
        expected = written[0, ids.shape[1] :]
        assert tokenizer.decode(expected) == answer["response"]
        assert len(expected) == answer["num_response_tokens"]
        assert answer["finish_reason"] == ("length" if len(expected) == MAX_TOKENS else "stop")


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_checkpoint_answers_like_its_export(tmp_path: Path, data: list[TaskFiles]) -> None:
    """Under the layout that wrote it and under another one, sent by ranks; the export is read by the engine alone."""
    base = make_checkpoint(tmp_path / "base", tied=True)
    where = [f"run.dir={tmp_path}", "run.name=sft", f"model.path={base}", f"sft.train=[{data[0].sft}]"]
    steps = ["sft.batch_size=8", "sft.total_steps=4", "actor.optimizer.lr=0.01", "run.deterministic=true"]
    run_to_end(tmp_path / "cwd", "sft", str(SFT_FILE), *SMALL, *steps, *where)
    run, other = tmp_path / "sft", ["actor.layout.tp=1", "actor.layout.sequence_parallel=false"]
    evaluate(run, tmp_path / "export", data)
    evaluate(run / "checkpoints" / "step_000004", tmp_path / "same", data, "sync.verify=true")
    evaluate(run / "checkpoints" / "step_000004", tmp_path / "other", data, *other)
    answers = {name: rows(tmp_path / name / "samples.parquet") for name in ("export", "same", "other")}
    assert answers["same"] == answers["other"] == answers["export"]
    # The engine was started on the base model, whose weights are others.
    weights = [load_file(path / "model.safetensors") for path in (base, run / "export")]
    assert any(not torch.equal(tensor, weights[1][name]) for name, tensor in weights[0].items())


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("num_engines", "at_checkpoint"), [(1, False), (2, True)])
def test_engines_that_die_are_replaced(
    num_engines: int, at_checkpoint: bool, tmp_path: Path, data: list[TaskFiles]
) -> None:
    """Answers are those of an undisturbed evaluation."""
    model = make_checkpoint(tmp_path / "model", tied=True)
    settings = [f"rollout.engine.num_engines={num_engines}"]
    if at_checkpoint:
        where = [f"run.dir={tmp_path}", "run.name=sft", f"model.path={model}", f"sft.train=[{data[0].sft}]"]
        steps = ["sft.batch_size=8", "sft.total_steps=1", "actor.optimizer.lr=0.01"]
        run_to_end(tmp_path / "cwd", "sft", str(SFT_FILE), *SMALL, *steps, *where)
        model = tmp_path / "sft" / "checkpoints" / "step_000001"
    evaluate(model, tmp_path / "undisturbed", data, *settings)
    out = tmp_path / "disturbed"
    out.mkdir()
    files = [str(each.val) for each in data]
    # Few at a time, so that some are left when an engine dies.
    slow = ["data.max_prompt_tokens=128", "rollout.engine.max_num_seqs=2", *settings]
    options = ["--num-samples", str(NUM_SAMPLES), "--k", "1", "3", "--max-response-tokens", str(MAX_TOKENS)]
    run = cli_run.start(out, "eval", str(model), *slow, "--data", *files, *options, "--out", str(out))
    try:
        run_id = run.run_id()
        run.wait_until(lambda: "eval " in run.stdout.read_text(), "the evaluation")
        os.kill(run.pid_of("ray::EngineActor", run_id), signal.SIGKILL)
        assert run.process.wait(300) == 0, run.stderr.read_text()
        assert leftovers(run_id) == []
    finally:
        run.end()
    assert "restart 1 of 3" in run.stdout.read_text()
    assert rows(out / "samples.parquet") == rows(tmp_path / "undisturbed" / "samples.parquet")
