"""Prompt files as they are published open and train, without a conversion."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megarl.cluster.cluster import Cluster
from megarl.config import load_config
from megarl.config.generation import Sampling
from megarl.config.schema import DataConfig
from megarl.record.metrics import read_metrics
from megarl.record.recorder import RunRecorder
from megarl.rollout.source import SamplingPlan, collect
from megarl.rollout.vllm_source import VllmSource
from megarl.train.inputs import open_train_inputs
from megarl.train.wiring import build_trainer
from megarl_lab.recipes.tiny_model import make_byte_tokenizer
from tests.e2e.support import RUN_FILE, SMALL, UnattendedEngines, random_prompts, tied_head
from tests.helpers.loops import begin_groups
from tests.helpers.public_rows import PUBLIC_FORMS

TOKENIZER = make_byte_tokenizer()
SHORT = ("TinyZero Countdown", "OpenRLHF")


@tied_head
@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in SHORT else pytest.mark.long) for n in PUBLIC_FORMS])
def test_two_steps(cluster: Cluster, model: Path, tmp_path: Path, name: str) -> None:
    row, form, _ = PUBLIC_FORMS[name]
    pq.write_table(pa.Table.from_pylist([row] * 8), tmp_path / "train.parquet")
    default = asdict(DataConfig())
    settings = [f"data.{key}={json.dumps(value)}" for key, value in asdict(form).items() if value != default[key]]
    overrides = [
        *SMALL,
        *settings,
        f"model.path={model}",
        f"run.dir={tmp_path}",
        "run.name=run",
        f"data.train=[{tmp_path / 'train.parquet'}]",
        "data.val=[]",
        "trainer.total_steps=2",
        "trainer.prompts_per_step=4",
        "rollout.num_samples=4",
        "validation.before_train=false",
        "logging.rollout_every_steps=0",
    ]
    config = load_config(RUN_FILE, overrides)
    recorder = RunRecorder(config, overwrite=True)
    build_trainer(open_train_inputs(config), cluster, recorder).fit()
    steps = [record.metrics for record in read_metrics(recorder.paths.metrics)]
    assert len(steps) == 2
    # Every response was judged by the source's scorer; what a random model writes has no answer, or a wrong one.
    for metrics in steps:
        assert metrics["reward/parse_failed_frac"] + metrics["reward/wrong_frac"] == 1.0


@tied_head
def test_stop_strings_and_tokens_end_responses(cluster: Cluster) -> None:
    """A response ends with the first token whose text completes a stop string, or with a stop token."""

    def sample(**ends: Any) -> list[list[int]]:
        prompts = random_prompts([5, 9, 12])
        plan = SamplingPlan(
            step=1, num_samples=4, sampling=Sampling(temperature=1.0, **ends), max_response_tokens=48, run_seed=3
        )
        source = VllmSource(engines := UnattendedEngines(cluster.engines))
        batch = collect(engines.wait, begin_groups(source, prompts, plan), timeout_s=60.0)
        return [sample.response_token_ids.tolist() for sample in batch.samples]

    free = sample()
    # A token of the first response, of which every other response may have some, too.
    stop = free[0][len(free[0]) // 2]
    expected = [tokens[: tokens.index(stop) + 1] if stop in tokens else tokens for tokens in free]
    assert sample(stop_token_ids=(stop,)) == expected
    # Bytes are tokens, so that a letter is one.
    letter = next(token for tokens in free for token in tokens if chr(97) <= TOKENIZER.decode([token]) <= chr(122))
    expected = [tokens[: tokens.index(letter) + 1] if letter in tokens else tokens for tokens in free]
    assert sample(stop=(TOKENIZER.decode([letter]),)) == expected
