"""Runs with teachers, as a user starts them: from a file, with several that take turns on the devices, and with one
that writes.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megarl.config import load_config
from megarl.data.chat import load_tokenizer
from megarl.data.demonstrations import SftDataset
from megarl.data.sampler import PromptSampler
from megarl.record.metrics import RunPaths, read_metrics
from megarl.rollout.replay import read_record, record_path
from megarl.types import Message
from megarl_lab.recipes.tasks.generate import TaskFiles
from tests.e2e.support import RUN_FILE, SFT_FILE, SMALL, tied_head
from tests.helpers.checkpoints import load_hf, make_checkpoint
from tests.helpers.kill_resume import SmallRun, differences, make_inputs
from tests.helpers.killed import kill
from tests.helpers.served import KEY, serving
from tests.helpers.waiting import wait_until

pytestmark = pytest.mark.long
RL = (
    *("trainer.total_steps=2", "trainer.prompts_per_step=4", "rollout.num_samples=2", "validation.every_steps=2"),
    *("rollout.max_response_tokens=16", "validation.max_prompts=8", "logging.rollout_every_steps=1"),
)
TOP_K = 6
# What a teacher reads in place of the question, the column that this takes, and the settings that say so.
HINT = ("Hint: {hint}\n{question}", "gold_solution", ("use.algo=self_distill", "algo.distill.exclude_answer=false"))
DEMONSTRATION = (
    "{question}\nFor example:\n{hint}\nNow answer.",
    "target",
    (*HINT[2], "algo.cpo.hint.source=demonstration", "algo.cpo.hint.place=user_turn"),
)


def completed(*arguments: str) -> None:
    """Run a command of megarl to its end."""
    result = subprocess.run(
        [sys.executable, "-m", "megarl.cli", *arguments], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr[-3000:]


def metrics_of(root: Path) -> dict[int, dict[str, float]]:
    merged: dict[int, dict[str, float]] = {}
    for record in read_metrics(RunPaths(root).metrics):
        merged.setdefault(record.step, {}).update(record.metrics)
    return merged


@tied_head
def test_a_file_is_learnt_by_the_divergence_from_a_teacher(model: Path, sums: TaskFiles, tmp_path: Path) -> None:
    teacher = make_checkpoint(tmp_path / "teacher", tied=True, seed=5)
    overrides = [
        *SMALL,
        *("sft.batch_size=8", "sft.total_steps=2", f"run.dir={tmp_path}", "run.name=sft", f"model.path={model}"),
        *(f"sft.train=[{sums.sft}]", "algo.distill.teacher=model", "algo.distill.mode=exact"),
        *("algo.distill.divergence=forward", f"teacher.model_path={teacher}"),
    ]
    completed("sft", str(SFT_FILE), *overrides)
    config = load_config(SFT_FILE, overrides)
    data = SftDataset(
        config.sft.train,
        load_tokenizer(model),
        max_prompt_tokens=config.data.max_prompt_tokens,
        max_response_tokens=config.rollout.max_response_tokens,
        settings=config.sft,
    )
    rows = data.rows(PromptSampler(len(data), 8, config.run.seed, config.data.shuffle).next_batch())
    total, policy, other = 0.0, load_hf(model, torch.float64), load_hf(teacher, torch.float64)
    for row in rows:
        tokens, kept = torch.from_numpy(row.token_ids.astype(int))[None], torch.from_numpy(row.loss_mask)
        with torch.no_grad():
            log_p, log_q = (
                each(tokens).logits[0, row.num_prompt_tokens - 1 : -1][kept].log_softmax(-1) for each in (policy, other)
            )
        total += float((log_q.exp() * (log_q - log_p)).sum())
    expected = total / sum(row.num_loss_tokens for row in rows)
    found = metrics_of(tmp_path / "sft")
    assert found[1]["distill/loss"] == pytest.approx(expected, rel=1e-5)
    assert found[2]["distill/loss"] < found[1]["distill/loss"]


@tied_head
def test_several_teachers_take_turns_with_the_policy_on_the_devices(
    model: Path, sums: TaskFiles, tmp_path: Path
) -> None:
    """One of them has a layout of its own, and teaches what no other does."""
    paths = [make_checkpoint(tmp_path / f"teacher{seed}", tied=True, seed=seed) for seed in (5, 6)]
    completed(
        "train",
        str(RUN_FILE),
        *(*SMALL, *RL, "use.algo=opd", f"run.dir={tmp_path}", "run.name=opd", f"model.path={model}"),
        *(f"data.train=[{sums.train}]", f"data.val=[{sums.val}]", "placement.offload=true"),
        f"teachers={{sums: {{model_path: {paths[0]}, sources: [megarl/sums]}}}}",
        *(f"teacher.model_path={paths[1]}", "teacher.layout={dp: 2}"),
    )
    found = metrics_of(tmp_path / "opd")
    assert found[2]["memory/offloaded_gib/teachers.sums"] > 0
    assert found[2]["distill/reverse_kl"] > 0
    assert found[2]["val/distill/reverse_kl"] > 0


@tied_head
def test_the_policy_learns_from_what_a_servers_teacher_writes(
    model: Path, sums: TaskFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of the samples are the teacher's, and the likeliest tokens of both teach."""
    teacher = make_checkpoint(tmp_path / "teacher", tied=True, seed=5)
    monkeypatch.setenv("TEACHER_KEY", KEY)
    with serving(teacher, tmp_path / "server.log", top_k=6) as url:
        completed(
            "train",
            str(RUN_FILE),
            *(*SMALL, *RL, "use.algo=gkd", f"run.dir={tmp_path}", "run.name=gkd", f"model.path={model}"),
            *(f"data.train=[{sums.train}]", f"data.val=[{sums.val}]", f"teacher.model_path={teacher}"),
            *("algo.demonstrations.source=teacher", "algo.demonstrations.keep_frac=1.0"),
            *("algo.distill.mode=topk", "algo.distill.top_k=6", f"teacher.servers=[{url}]"),
            "teacher.api_key_env=TEACHER_KEY",
        )
    found = metrics_of(tmp_path / "gkd")
    # One of two samples of each prompt; a random teacher hardly ever ends, so that its answers are cut.
    assert found[1]["batch/avg_prefix_ratio"] == pytest.approx(0.5, abs=0.1)
    assert found[2]["distill/loss"] > 0


@pytest.mark.timeout(1200)
def test_a_run_with_a_teacher_that_follows_is_killed_and_ends_as_if_it_were_not(tmp_path: Path) -> None:
    """Float32 on two tensor-parallel ranks with offload: metrics and exported weights are equal bit for bit."""
    inputs = make_inputs(tmp_path)
    settings = (
        *("trainer.total_steps=3", "placement.offload=true", "algo.distill.teacher=hint", "algo.distill.mode=exact"),
        *("algo.distill.teacher_update_rate=0.3", "actor.optimizer.warmup_steps=0"),
    )
    reference, run = (SmallRun(inputs=inputs, name=name, settings=settings) for name in ("whole", "killed"))
    assert reference.start().wait() == 0
    process = run.start()
    try:
        wait_until(lambda: run.last_step() >= 2, "step 2", timeout_s=600.0, seen=run.last_step, process=process)
        assert kill(process).leftovers == ()
    finally:
        process.kill()
        process.wait()
    assert run.start().wait() == 0
    assert differences(run, reference) == []
    found = metrics_of(run.paths.root)
    assert [step for step in found if "distill/teacher_distance" in found[step]] == [1, 2, 3]
    distances = [found[step]["distill/teacher_distance"] for step in (1, 2, 3)]
    assert min(distances) > 0


def divergences(log_p: torch.Tensor, log_q: torch.Tensor, top_k: int | None) -> dict[str, torch.Tensor]:
    """Values of each token [N]. top_k: all but so many tokens, the teacher's likeliest, are one outcome; None: none."""
    same = log_p.argmax(-1) == log_q.argmax(-1)
    found = {"agreement": same.double()}
    if top_k is not None:
        ids = log_q.topk(top_k).indices
        found["mass_in_top_k"] = log_q.gather(1, ids).exp().sum(-1)
        log_p, log_q = (
            torch.cat([top, torch.log1p(-top.exp().sum(-1, keepdim=True))], -1)
            for top in (each.gather(1, ids) for each in (log_p, log_q))
        )
    p, q = log_p.exp(), log_q.exp()
    found |= {"reverse_kl": (p * (log_p - log_q)).sum(-1), "forward_kl": (q * (log_q - log_p)).sum(-1)}
    return found | {"teacher_entropy": -(q * log_q).sum(-1)}


@pytest.mark.parametrize(
    ("reads", "top_k"),
    [
        pytest.param(None, TOP_K, id="model"),
        pytest.param(HINT, TOP_K, id="hint"),
        pytest.param(DEMONSTRATION, None, id="demonstration"),
    ],
)
def test_the_first_step_logs_the_divergence_of_transformers(
    reads: tuple[str, str, tuple[str, ...]] | None,
    top_k: int | None,
    model: Path,
    sums: TaskFiles,
    tmp_path: Path,
) -> None:
    """A teacher, or the policy itself with a hint, reads the policy's samples."""
    teacher = make_checkpoint(tmp_path / "teacher", tied=True, seed=5) if reads is None else model
    template, column, settings = reads or ("{question}", "", ("use.algo=opd_exact",))
    settings += tuple(f"algo.distill.{k}={v}" for k, v in {"mode": "topk", "top_k": TOP_K}.items() if top_k)
    settings += (f"algo.cpo.hint.template={json.dumps(template.removesuffix('{question}'))}",) if reads else ()
    settings += () if reads else (f"teacher.model_path={teacher}",)
    completed(
        "train",
        str(RUN_FILE),
        *(*SMALL, *RL, f"run.dir={tmp_path}", "run.name=run", f"model.path={model}", "rollout.record=true"),
        *(f"data.train=[{sums.train}]", f"data.val=[{sums.val}]", *settings),
    )
    rollout = read_record(record_path(RunPaths(tmp_path / "run").records, 1))
    tokenizer, values = load_tokenizer(model), dict[str, list[torch.Tensor]]()
    policy, other = (load_hf(path, torch.float64) for path in (model, teacher))
    for sample in rollout.samples:
        prompt = rollout.prompts[sample.uid]
        hint = prompt.target if column == "target" else prompt.extra_info.get(column, "")
        question = template.replace("{question}", prompt.messages[-1].content).replace("{hint}", hint)
        chat = [Message(role="user", content=question).as_dict()]
        asked = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
        answer, logs = sample.response_token_ids.tolist(), []
        for reader, ids in ((policy, sample.prompt_token_ids.tolist()), (other, asked)):
            with torch.no_grad():
                logs.append(reader(torch.tensor([[*ids, *answer]])).logits[0, len(ids) - 1 : -1].log_softmax(-1))
        for name, each in divergences(*logs, top_k).items():
            values.setdefault(name, []).append(each)
    found = metrics_of(tmp_path / "run")[1]
    for name, each in values.items():
        assert found[f"distill/{name}"] == pytest.approx(float(torch.cat(each).mean()), rel=1e-5), name
    assert found["distill/loss"] == pytest.approx(float(torch.cat(values["reverse_kl"]).mean()), rel=1e-5)
    assert found["mismatch/abs_mean"] < 1e-4
