"""From demonstrations to a report: supervised run, RL run, export and replay, as a user starts them."""

import contextlib
import json
import re
import signal
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import yaml
from matplotlib.image import imread
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from megarl.cli import main
from megarl.cluster.cluster import Cluster
from megarl.config import load_config
from megarl.config.load import from_dict
from megarl.config.schema import Config
from megarl.data.demonstrations import SftDataset
from megarl.record.metrics import RunPaths, read_metrics
from megarl.record.rollouts import read_rollouts
from megarl.record.timeline import read_timeline
from megarl_lab.recipes.tasks import TASKS
from megarl_lab.recipes.tasks.generate import ChatConfig, TaskFiles, generate_chats
from tests.e2e import cli_run
from tests.e2e.support import (
    RUN_FILE,
    SFT_FILE,
    SMALL,
    largest_difference,
    open_policy,
    random_prompts,
    rows_of,
    small_config,
    tied_head,
)
from tests.helpers.kill_resume import MEASURED

LR = 1e-3
# Two optimizer steps for each of three batches. The entropy's gradient moves the policy whatever the rewards are.
RL = (
    "algo.kl.where=loss",
    "algo.kl.coef=0.01",
    "algo.entropy_coef=0.01",
    "trainer.total_steps=3",
    "trainer.prompts_per_step=8",
    "trainer.mini_batch_prompts=4",
    "rollout.num_samples=4",
    "rollout.max_response_tokens=16",
    "rollout.record=true",
    "validation.every_steps=2",
    f"actor.optimizer.lr={LR}",
    "actor.optimizer.warmup_steps=4",
    "logging.rollout_every_steps=5",
)


class Runs:
    """A directory of runs on one data set, and how to start another one."""

    def __init__(self, root: Path, sums: TaskFiles) -> None:
        self.root, self.sums = root, sums

    def paths(self, name: str) -> RunPaths:
        return RunPaths(self.root / name)

    def train_arguments(self, name: str, *overrides: str) -> list[str]:
        data = [f"data.train=[{self.sums.train}]", f"data.val=[{self.sums.val}]"]
        where = [f"run.dir={self.root}", f"run.name={name}", f"model.path={self.paths('sft').export}"]
        return ["train", str(RUN_FILE), *SMALL, *RL, *data, *where, *overrides]

    @property
    def chats(self) -> Path:
        """Held-out chats of two answers each."""
        path = self.root / "chats.jsonl"
        texts = [("1+2=?", "3"), ("3+9=?", "12"), ("+5=?", "17")]
        speakers = ("user", "assistant")
        turns = [{"role": speakers[i], "content": pair[i]} for pair in texts for i in range(2)]
        path.write_text("".join(json.dumps({"messages": turns[i : i + 4]}) + "\n" for i in (0, 2)))
        return path

    def sft_arguments(self, model: Path) -> list[str]:
        where = [f"run.dir={self.root}", "run.name=sft", f"model.path={model}", f"sft.train=[{self.sums.sft}]"]
        return [
            "sft",
            str(SFT_FILE),
            *SMALL,
            "sft.batch_size=8",
            "sft.total_steps=4",
            f"sft.val=[{self.chats}]",
            "actor.optimizer.lr=0.01",
            *where,
        ]

    def metrics(self, name: str) -> dict[int, dict[str, float]]:
        """step → what was logged of it, but for times and memory."""
        merged: dict[int, dict[str, float]] = {}
        for record in read_metrics(self.paths(name).metrics):
            computed = {k: v for k, v in record.metrics.items() if not k.startswith(MEASURED)}
            merged.setdefault(record.step, {}).update(computed)
        return merged


@contextlib.contextmanager
def on_cluster(cluster: Cluster) -> Iterator[Callable[[list[str]], int]]:
    """The command in this process, on the cluster that is there; returns the exit code."""
    handlers = {signum: signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM)}

    def run(arguments: list[str]) -> int:
        try:
            main(arguments)
        except SystemExit as ended:
            return int(ended.code or 0)
        return 0

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("megarl.cluster.cluster.Cluster", lambda *_, **__: contextlib.nullcontext(cluster))
        yield run
    for signum, handler in handlers.items():
        signal.signal(signum, handler)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, sums: TaskFiles, model: Path, cluster: Cluster) -> Runs:
    """`sft` on the cluster that is there, then `rl` on its export, as a user starts it."""
    runs = Runs(tmp_path_factory.mktemp("runs"), sums)
    with on_cluster(cluster) as megarl:
        assert megarl(runs.sft_arguments(model)) == 0
    run = cli_run.start(tmp_path_factory.mktemp("cwd"), *runs.train_arguments("rl", "logging.tensorboard=true"))
    try:
        run_id = run.run_id()
        assert run.process.wait(cli_run.START_S) == 0, run.stderr.read_text()
        assert cli_run.leftovers(run_id) == []
    finally:
        run.end()
    return runs


@pytest.fixture
def megarl(cluster: Cluster) -> Iterator[Callable[[list[str]], int]]:
    with on_cluster(cluster) as run:
        yield run


@tied_head
def test_supervised_run(runs: Runs, model: Path) -> None:
    metrics = runs.metrics("sft")
    assert list(metrics) == [0, 1, 2, 3, 4]
    assert metrics[4]["actor/loss"] < metrics[1]["actor/loss"]
    assert (runs.paths("sft").root / "report.html").exists()
    tokenizer = AutoTokenizer.from_pretrained(model)
    data = SftDataset([runs.chats], tokenizer, max_prompt_tokens=64, max_response_tokens=64)
    for step, directory in ((0, model), (4, runs.paths("sft").export)):
        reference = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        losses = []
        for row in (data[0], data[1]):
            ids = torch.from_numpy(row.token_ids)[None]
            logprobs = reference(ids).logits[0, :-1].log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
            losses.append(-logprobs[row.num_prompt_tokens - 1 :][torch.from_numpy(row.loss_mask)])
        assert metrics[step]["val/sft/nll"] == pytest.approx(torch.cat(losses).mean().item(), abs=1e-5)
    assert (runs.paths("sft").export / "model.safetensors").exists()


@tied_head
def test_chats_for_two_epochs(
    runs: Runs, model: Path, megarl: Callable[[list[str]], int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """configs/run/sums-chats.yaml, small: 20 chats of which one is too long, on the two ranks that are there."""
    files = generate_chats(TASKS.get("sums"), tmp_path, ChatConfig(num_train=19, num_val=5))
    turns = [{"from": "human", "value": "1+1=?"}, {"from": "gpt", "value": "2" * 600}]
    long = tmp_path / "long.jsonl"
    long.write_text(json.dumps({"conversations": turns}))
    settings = (
        *(
            f"model.path={model}",
            f"run.dir={runs.root}",
            f"sft.train=[{files.train}, {long}]",
            f"sft.val=[{files.val}]",
        ),
        *("sft.total_epochs=2", "sft.batch_size=8", "sft.val_every_steps=3", "actor.optimizer.warmup_steps=0"),
        *("actor.layout.tp=2", "actor.layout.sequence_parallel=true", "logging.tensorboard=false"),
    )
    assert megarl(["sft", str(SFT_FILE.with_name("sums-chats.yaml")), *settings]) == 0
    said = capsys.readouterr().out
    assert "2 epochs of 19 examples are 4 steps of 8; the last 6 of the last epoch are left out" in said
    assert "warning: sft.train: dropped 1 and cut 0 of 20 rows over sft.max_tokens=512" in said
    metrics = runs.metrics("chats")
    assert [step for step in metrics if "val/sft/perplexity" in metrics[step]] == [0, 3, 4]
    assert metrics[4]["val/sft/nll"] < metrics[0]["val/sft/nll"]
    assert metrics[0]["val/sft/num_rows"] == 5


@tied_head
def test_exactly_the_steps_that_were_asked_for(runs: Runs) -> None:
    records = read_metrics(runs.paths("rl").metrics)
    assert [r.step for r in records if "actor/loss" in r.metrics] == [1, 2, 3]
    assert [r.step for r in records if "val/test_score/megarl/sums" in r.metrics] == [0, 2, 3]
    assert all(r.metrics["val/num_prompts/megarl/sums"] == 4 for r in records if r.step == 0)


@tied_head
def test_two_optimizer_steps_per_batch(runs: Runs) -> None:
    """Warm-up over four steps: rates of 1/4 and 2/4, then 3/4 and 4/4, then the full rate."""
    rates = [runs.metrics("rl")[step]["actor/lr"] for step in (1, 2, 3)]
    assert rates == pytest.approx([LR * 3 / 8, LR * 7 / 8, LR])


@tied_head
def test_kl_to_the_reference_starts_at_zero_and_grows(runs: Runs) -> None:
    kls = [runs.metrics("rl")[step]["actor/ref_kl"] for step in (1, 2, 3)]
    assert 0 < kls[0] < kls[1] < kls[2]


@tied_head
def test_files_of_a_run(runs: Runs) -> None:
    paths = runs.paths("rl")
    names = {str(file.relative_to(paths.root)) for file in paths.root.rglob("*") if file.is_file()}
    expected = {"config.yaml", "metrics.jsonl", "report.html", "report.png"}
    expected |= {f"rollouts/step_00000{step}.parquet" for step in (1, 3)}
    expected |= {f"records/step_00000{step}.parquet" for step in (1, 2, 3)}
    expected |= {f"validation/step_00000{step}.parquet" for step in (0, 2, 3)}
    expected |= {f"export/{file.name}" for file in runs.paths("sft").export.iterdir()}
    assert expected <= names
    assert {name.split("/")[0] for name in names - expected} <= {
        "tensorboard",
        "versions.json",
        "checkpoints",
        "status.json",
        "timeline.jsonl",
        "reward_problems.jsonl",
        "warnings.jsonl",
        "report",
    }
    # Whatever the umask is, no other user reads what a run wrote.
    modes = {path: path.stat().st_mode & 0o777 for path in (paths.root, *paths.root.rglob("*"))}
    assert {path: oct(mode) for path, mode in modes.items() if mode != (0o700 if path.is_dir() else 0o600)} == {}
    arguments = runs.train_arguments("rl", "logging.tensorboard=true")[2:]
    assert from_dict(Config, yaml.safe_load(paths.config.read_text())) == load_config(RUN_FILE, arguments)


@tied_head
def test_timeline(runs: Runs) -> None:
    """The stages of a step lie in it, one after another, and are as long as the metrics say."""
    timeline = read_timeline(runs.paths("rl").timeline)
    steps = {i.step: i for i in timeline if i.lane == "step"}
    stages = [i for i in timeline if i.lane == "trainer"]
    assert list(steps) == [1, 2, 3]
    logged = {r.step: r.metrics for r in read_metrics(runs.paths("rl").metrics) if "timing_s/step" in r.metrics}
    for step, whole in steps.items():
        inside = [i for i in stages if i.step == step and i.name not in ("testing", "save_checkpoint")]
        assert {"gen", "reward", "ref", "old_log_prob", "adv", "update_actor", "sync"} == {i.name for i in inside}
        for before, after in pairwise(sorted(inside, key=lambda i: i.start_s)):
            assert before.end_s <= after.start_s
        for name in {i.name for i in inside}:
            seconds = sum(i.end_s - i.start_s for i in inside if i.name == name)
            # Unix seconds are known to a quarter of a microsecond.
            assert seconds == pytest.approx(logged[step][f"timing_s/{name}"], abs=1e-5)
        assert whole.start_s <= min(i.start_s for i in inside)
        assert max(i.end_s for i in inside) <= whole.end_s
        waits = sum(i.end_s - i.start_s for i in inside if i.name in ("gen", "reward"))
        assert waits / (whole.end_s - whole.start_s) <= logged[step]["perf/trainer_idle_frac"] + 1e-6
        assert logged[step]["perf/trainer_idle_frac"] < 1
    assert [i.step for i in stages if i.name == "testing"] == [0, 2, 3]


@tied_head
def test_report(runs: Runs) -> None:
    paths = runs.paths("rl")
    page = paths.report_html.read_text()
    for text in ("critic/score/mean", "mismatch/abs_mean", "val/test_score", "Timeline</h2>", "Steps 1 to 3"):
        assert text in page
    # Every recorded token has its values, and the engine's log-probs are the trainer's.
    assert "Browse" in page
    assert (paths.report_files / "tokens_00000.js").is_file()
    for row in (row for step in (1, 3) for row in read_rollouts(paths.rollouts(step))):
        values = (row.tokens, row.rollout_logprobs, row.old_logprobs, row.advantage)
        assert [len(each) for each in values] == [row.num_response_tokens] * 4
        assert row.rollout_logprobs == pytest.approx(row.old_logprobs, abs=1e-3)
    picture = imread(paths.report_png)
    assert min(picture.shape[:2]) > 300
    # Not blank: one pixel of 64 is enough to see it.
    assert np.unique(picture[::8, ::8].reshape(-1, picture.shape[-1]), axis=0).shape[0] > 20


@tied_head
def test_export_is_the_policy_in_transformers_engine_and_trainer(runs: Runs, cluster: Cluster) -> None:
    export = runs.paths("rl").export
    started = load_file(runs.paths("sft").export / "model.safetensors")
    assert any(not torch.equal(t, started[n]) for n, t in load_file(export / "model.safetensors").items())
    policy = open_policy(cluster, small_config(export))
    policy.sync.push(0, verify=True)
    policy.sync.close()
    prompts = random_prompts(range(8, 16))
    samples = policy.rollout(prompts, num_samples=1, temperature=0.0, max_tokens=16).samples
    hf = AutoModelForCausalLM.from_pretrained(export, dtype=torch.float32).eval()
    hf_logprobs = []
    for prompt, sample in zip(prompts, samples, strict=True):
        ids = torch.tensor([prompt.token_ids])
        written = hf.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=16)
        assert written[0, len(prompt.token_ids) :].tolist() == sample.response_token_ids.tolist()
        with torch.no_grad():
            logits = hf(ids).logits[0, :-1]
        hf_logprobs.append(logits.log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0].numpy())
    recomputed = policy.logprobs(rows_of([prompt.token_ids for prompt in prompts]))
    assert largest_difference(hf_logprobs, recomputed) <= 1e-5


@pytest.mark.long
@tied_head
def test_trainers_that_share_a_cluster_do_the_same(runs: Runs, megarl: Callable[..., int]) -> None:
    """And the same as the run that had a cluster of its own."""
    for name in ("first", "second"):
        assert megarl(runs.train_arguments(name)) == 0
    assert runs.metrics("first") == runs.metrics("second") == runs.metrics("rl")


def record_tables(paths: RunPaths) -> list[pa.Table]:
    return [pq.read_table(file) for file in sorted(paths.records.iterdir())]


@tied_head
def test_replay_repeats_the_run(runs: Runs, megarl: Callable[..., int]) -> None:
    recorded = runs.paths("rl")
    overrides = ["rollout.source=replay", f"rollout.replay_dir={recorded.records}"]
    assert megarl(runs.train_arguments("replayed", *overrides)) == 0
    assert record_tables(runs.paths("replayed")) == record_tables(recorded)
    assert runs.metrics("replayed") == runs.metrics("rl")


@tied_head
def test_a_record_of_another_temperature_is_refused(
    runs: Runs, megarl: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    replay = ["rollout.source=replay", f"rollout.replay_dir={runs.paths('rl').records}", "rollout.temperature=0.7"]
    assert megarl(runs.train_arguments("colder", *replay)) == 1
    assert "nats on average before the first update, the limit is 1e-04" in capsys.readouterr().err


def spoil_weight(source: Path, target: Path) -> Path:
    """A copy of a model with a NaN in the last norm."""
    target.mkdir()
    for file in source.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    tensors = load_file(target / "model.safetensors")
    tensors["model.norm.weight"][3] = float("nan")
    save_file(tensors, target / "model.safetensors")
    return target


def spoil_record(source: Path, target: Path, step: int) -> str:
    """A copy of records with a NaN in the second row of a step; that row's name."""
    target.mkdir()
    for file in source.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    file = target / f"step_{step:06d}.parquet"
    table = pq.read_table(file)
    rows = table.to_pylist()
    rows[1]["segments"][1]["rollout_logprobs"][0] = float("nan")
    pq.write_table(pa.Table.from_pylist(rows, schema=table.schema), file)
    return f"{rows[1]['uid']}/{rows[1]['sample_index']}"


@tied_head
def test_nan_stops_the_run_with_step_and_row(
    runs: Runs, megarl: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = f"model.path={spoil_weight(runs.paths('sft').export, tmp_path / 'nan')}"
    records = runs.paths("rl").records
    row = spoil_record(records, tmp_path / "records", step=2)
    cases: Mapping[str, tuple[list[str], str]] = {
        # Whichever sample is finished first.
        "engine": ([model], r"error: step 1: rollout log-probs of row megarl/sums:\d+/\d+ are not finite; "),
        "trainer": (
            [model, "rollout.source=replay", f"rollout.replay_dir={records}"],
            "error: step 1: log-probs of row ",
        ),
        "record": (
            ["rollout.source=replay", f"rollout.replay_dir={tmp_path / 'records'}"],
            rf"error: step 2: rollout log-probs of row {row} are not finite; ",
        ),
    }
    for name, (overrides, message) in cases.items():
        assert megarl(runs.train_arguments(f"nan-{name}", "data.val=[]", *overrides)) == 1
        (line,) = capsys.readouterr().err.splitlines()
        assert re.match(message, line)
        steps = [r.step for r in read_metrics(runs.paths(f"nan-{name}").metrics)]
        assert steps == ([1] if name == "record" else [])
