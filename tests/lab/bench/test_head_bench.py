"""The bench of the log-prob head: options, float64 answers, and a small run whose gradients agree."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megarl.errors import ConfigError
from megarl_lab.bench import head
from megarl_lab.bench.head_problem import HeadObjective, Inputs, Size, dense_gradients
from megarl_lab.bench.memory import ResidentMemory

ROWS, MIB = 1024, 1 << 20


def test_what_others_are_divided_by_is_measured_too() -> None:
    run, _ = head.parse(["--out", "x", "--contenders", "megatron_verl", "tv keep"])
    assert list(run.contenders) == ["recompute", "plain keep", "megatron_verl", "tv keep"]
    assert (run.dtype, run.world_size, run.size) == ("float32", 2, Size(vocab=151936, rows=4096, hidden=512))


@pytest.mark.parametrize(
    ("options", "message"),
    [("--device cuda", "no NVIDIA device is here"), ("--vocab 1001", "got 1001 on 2 ranks, expected a multiple")],
)
def test_bad_options(options: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head, "nvidia_devices", list)
    with pytest.raises(ConfigError, match=message):
        head.parse(["--out", "x", *options.split()])


def test_dense_gradients_are_those_of_torch_distributions() -> None:
    size = Size(vocab=8, rows=3, hidden=2)
    parts = [Inputs.make(size, rank, 2, torch.float32, torch.device("cpu")) for rank in range(2)]
    hidden = parts[0].hidden.detach().double().requires_grad_()
    weight = torch.cat([part.weight.detach() for part in parts]).double().requires_grad_()
    policy = torch.distributions.Categorical(logits=hidden @ weight.t())
    loss = policy.log_prob(parts[1].labels) @ parts[1].by_logprobs.double()
    (loss + policy.entropy() @ parts[1].by_entropy.double()).backward()
    found = dense_gradients(size, HeadObjective.ENTROPY, 2, torch.float32)
    for got, expected in zip(found, (hidden.grad, weight.grad), strict=True):
        assert expected is not None
        assert torch.allclose(got, expected, rtol=0, atol=1e-12)


def test_peak_of_resident_memory() -> None:
    """64 MiB that are gone again; the kernel counts in batches of pages (proc_pid_status(5): "inaccurate")."""
    memory = ResidentMemory()
    memory.begin()
    gone = torch.ones(64 * MIB // 4)
    del gone
    assert memory.peak_bytes() / MIB == pytest.approx(64, abs=2)


@pytest.mark.long
def test_a_small_run(tmp_path: Path) -> None:
    """Every head agrees with float64 on two ranks; what keeps whole logits needs them thrice."""
    names = ("in_chunk", "megatron_verl", "reverse keep", "jsd in_chunk", "centering recompute", "tv keep")
    sizes = f"--vocab 2048 --rows {ROWS} --hidden 32 --rounds 2 --at-most 99".split()
    command = [sys.executable, "-m", "megarl_lab.bench.head", "--out", tmp_path / "x.json", *sizes, "--contenders"]
    done = subprocess.run(
        [*command, *names], cwd=Path(__file__).parents[3], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    found = {each["name"]: each for each in json.loads((tmp_path / "x.json").read_text())["results"]}
    assert found.keys() == {"recompute", *(f"plain {mode}" for mode in ("keep", "in_chunk", "recompute")), *names}
    assert all(each["error"] <= 1e-5 and len(each["seconds"]) == 2 for each in found.values()), done.stdout
    # [1024, 1024] float32 logits of a shard are 4 MiB.
    assert found["megatron_verl"]["memory_bytes"] >= 12 * MIB > found["recompute"]["memory_bytes"]
