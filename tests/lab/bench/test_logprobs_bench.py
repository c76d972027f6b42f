"""What the log-prob benchmark makes of its measurements: limits, predictions, bounds, tables, options."""

import math
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from megarl.errors import ConfigError
from megarl_lab.bench.logprobs import command
from megarl_lab.bench.logprobs.bound import bare_gemms
from megarl_lab.bench.logprobs.campaign import CampaignProgress, gemm_bound_s, predicted_bytes
from megarl_lab.bench.logprobs.contenders import CONTENDERS, DEFAULTS
from megarl_lab.bench.logprobs.figure import write_memory_png
from megarl_lab.bench.logprobs.limits import Judgement, LimitVerdict, judge
from megarl_lab.bench.logprobs.memory import ResidentMemory
from megarl_lab.bench.logprobs.problem import HeadOutputs, differences, make_problem, solve, solve_dense
from megarl_lab.bench.logprobs.records import MIB, HeadAgreement, Measurement, Report, Size, Traffic
from megarl_lab.bench.logprobs.tables import limits_text, report_text

SMALL, LARGE = Size(vocab=1000, rows=4096, hidden=256), Size(vocab=1000, rows=16384, hidden=256)


def measured(
    contender: str, size: Size, mib: float | None = None, total_s: Sequence[float] = (), collectives: int = 1
) -> Measurement:
    return Measurement(
        contender=contender,
        size=size,
        memory_bytes=None if mib is None else int(mib * MIB),
        forward=Traffic(num_collectives=collectives, num_bytes=12 * size.rows),
        backward=Traffic(num_collectives=1, num_bytes=4 * size.rows * size.hidden),
        forward_s=[second / 4 for second in total_s],
        total_s=total_s,
    )


def report_of(*measurements: Measurement, agreements: Sequence[HeadAgreement] = ()) -> Report:
    return Report(
        device="cpu",
        dtype="float32",
        itemsize=4,
        main_grad=False,
        world_size=2,
        versions={"torch": "2"},
        agreements=agreements,
        measurements=measurements,
    )


def judgement(report: Report, name: str) -> Judgement:
    (found,) = [each for each in judge(report) if each.limit.name.startswith(name)]
    return found


@pytest.mark.parametrize(("mib", "verdict"), [(40.0, LimitVerdict.PASS), (40.5, LimitVerdict.FAIL)])
def test_memory_beside_liger(mib: float, verdict: LimitVerdict) -> None:
    report = report_of(measured("recompute", SMALL, mib), measured("liger_fallback", SMALL, 100.0))
    found = judgement(report, "memory, recompute")
    assert found.worst is not None
    assert found.worst.value == pytest.approx(mib / 100)
    assert found.verdict is verdict


def test_memory_beside_liger_needs_many_rows() -> None:
    few = Size(vocab=1000, rows=1024, hidden=256)
    report = report_of(measured("recompute", few, 90.0), measured("liger_fallback", few, 100.0))
    assert judgement(report, "memory, recompute").verdict is LimitVerdict.NOTHING


@pytest.mark.parametrize(("mib", "verdict"), [(109.0, LimitVerdict.PASS), (111.0, LimitVerdict.FAIL)])
def test_memory_at_four_times_the_rows(mib: float, verdict: LimitVerdict) -> None:
    found = judgement(report_of(measured("recompute", SMALL, 100.0), measured("recompute", LARGE, mib)), "memory at 4×")
    assert found.worst is not None
    assert found.worst.value == pytest.approx(mib / 100)
    assert found.verdict is verdict


@pytest.mark.parametrize("name", ["recompute", "keep"])
def test_one_collective_in_forward(name: str) -> None:
    assert judgement(report_of(measured(name, SMALL)), "collectives").verdict is LimitVerdict.PASS
    assert judgement(report_of(measured(name, SMALL, collectives=2)), "collectives").verdict is LimitVerdict.FAIL
    assert (
        judgement(report_of(measured("in_chunk", SMALL, collectives=9)), "collectives").verdict is LimitVerdict.NOTHING
    )


def test_times_beside_small_peers_and_any() -> None:
    """Medians 1.2 against 1.0 of a peer of three times the memory and 1.3 of one of twice the memory."""
    report = report_of(
        measured("recompute", SMALL, 100.0, [1.2, 9.0, 1.1]),
        measured("liger_fallback", SMALL, 200.0, [1.3, 1.3, 0.1]),
        measured("megatron_verl", SMALL, 300.0, [1.0, 5.0, 1.0]),
        measured("gemms", SMALL, None, [0.1, 0.1, 0.1]),
    )
    small, any_peer = judgement(report, "time, recompute ÷ peers"), judgement(report, "time, recompute ÷ any")
    assert small.worst is not None
    assert small.worst.value == pytest.approx(1.2 / 1.3)
    assert small.worst.where.startswith("liger_fallback")
    assert small.verdict is LimitVerdict.PASS
    assert any_peer.worst is not None
    assert any_peer.worst.value == pytest.approx(1.2)
    assert any_peer.verdict is LimitVerdict.PASS


def test_keep_beside_the_fastest() -> None:
    peers = [measured("liger_fallback", SMALL, 1.0, [2.0]), measured("megatron_verl", SMALL, 1.0, [1.0])]
    assert judgement(report_of(measured("keep", SMALL, 1.0, [1.05]), *peers), "time, keep").verdict is LimitVerdict.PASS
    assert judgement(report_of(measured("keep", SMALL, 1.0, [1.15]), *peers), "time, keep").verdict is LimitVerdict.FAIL


@pytest.mark.parametrize(
    ("difference", "verdict"), [(1e-6, LimitVerdict.PASS), (2e-5, LimitVerdict.FAIL), (math.nan, LimitVerdict.FAIL)]
)
def test_disagreement_of_the_head(difference: float, verdict: LimitVerdict) -> None:
    differences_ = {"entropy": difference, "log-prob": 1e-7}
    agreement = HeadAgreement(contender="keep", tolerance=1e-5, differences=differences_)
    assert agreement.agrees is (verdict is LimitVerdict.PASS)
    assert judgement(report_of(agreements=[agreement]), "difference").verdict is verdict


def test_a_peer_that_disagrees_is_reported_only() -> None:
    agreement = HeadAgreement(contender="liger_fallback", tolerance=1e-5, differences={"entropy": 1.0})
    report = report_of(measured("liger_fallback", SMALL, 1.0), agreements=[agreement])
    assert judgement(report, "difference").verdict is LimitVerdict.NOTHING
    assert "DISAGREES" in report_text(report)


def test_predicted_bytes() -> None:
    """4 rows on 2 shards of 10 logits, hidden size 3: three weight shards are 3·10·3 numbers."""
    size = Size(vocab=20, rows=4, hidden=3)

    def predicted(name: str, itemsize: int) -> int:
        return predicted_bytes(CONTENDERS.get(name), size, world_size=2, itemsize=itemsize)

    assert predicted("recompute", 4) == predicted("liger_fallback", 4) == 90 * 4
    assert predicted("keep", 4) == 40 * 4 + 90 * 4
    # Float32: logits, the clone that becomes a softmax, a softmax. Bfloat16: a float32 softmax beside them.
    assert predicted("megatron_verl", 4) == 40 * 12 + 90 * 4
    assert predicted("megatron_verl", 2) == 40 * 10 + 90 * 2


def test_gemm_bound() -> None:
    """Of four products in 8 s, of which 2 s in forward, three take 6 s."""
    gemms = Measurement(contender="gemms", size=SMALL, forward_s=[2.0], total_s=[8.0])
    assert gemm_bound_s({"gemms": gemms}, 4) == 8.0
    assert gemm_bound_s({"gemms": gemms}, 3) == 6.0
    assert gemm_bound_s({"keep": measured("keep", SMALL, 1.0, [9.0])}, 3) is None


def test_gemms_are_those_of_a_head() -> None:
    """hidden [2, 2], weight [3, 2]: the products with logits z in place of their gradient, by hand."""
    problem = make_problem(Size(vocab=3, rows=2, hidden=2), rank=0, world_size=1, dtype=torch.float64)
    with torch.no_grad():
        problem.hidden.copy_(torch.tensor([[1.0, 2.0], [0.0, 1.0]]))
        problem.weight.copy_(torch.tensor([[1.0, 0.0], [0.0, 1.0], [2.0, 1.0]]))
    answer = solve(bare_gemms, problem)
    # z = [[1, 2, 4], [0, 1, 1]]
    assert answer.logprobs.tolist() == [1.0, 0.0]
    assert answer.grad_hidden.tolist() == [[9.0, 6.0], [2.0, 2.0]]
    assert answer.grad_weight.tolist() == [[1.0, 2.0], [2.0, 5.0], [4.0, 9.0]]


def test_differences_are_relative_to_the_largest_element_and_keep_nan() -> None:
    dense = solve_dense(Size(vocab=8, rows=3, hidden=2), world_size=2, dtype=torch.float32, with_entropy=True)
    half = dense.grad_weight.chunk(2)
    dense.grad_hidden[0, 0] = 50.0

    def answer(rank: int, shift: float) -> HeadOutputs:
        return HeadOutputs(
            logprobs=dense.logprobs,
            entropy=None,
            grad_hidden=dense.grad_hidden + shift,
            grad_weight=half[rank],
        )

    assert differences([answer(0, 0.0), answer(1, 5.0)], dense)["hidden gradient"] == pytest.approx(0.1)
    assert "entropy" not in differences([answer(0, 0.0), answer(1, 0.0)], dense)
    assert math.isnan(differences([answer(0, 0.0), answer(1, math.nan)], dense)["hidden gradient"])


def test_dense_answer_is_that_of_torch_distributions() -> None:
    size = Size(vocab=8, rows=3, hidden=2)
    dense = solve_dense(size, world_size=2, dtype=torch.float32, with_entropy=True)
    shares = [make_problem(size, rank=rank, world_size=2, dtype=torch.float32) for rank in range(2)]
    logits = shares[0].hidden.double() @ torch.cat([share.weight for share in shares]).double().t()
    categorical = torch.distributions.Categorical(logits=logits)
    assert torch.allclose(dense.logprobs, categorical.log_prob(shares[1].labels), rtol=0, atol=1e-12)
    assert dense.entropy is not None
    assert torch.allclose(dense.entropy, categorical.entropy(), rtol=0, atol=1e-12)
    # Rows of softmax gradients sum to 0, and so does the weight's gradient over the vocabulary.
    assert dense.grad_weight.shape == (8, 2)
    assert dense.grad_weight.sum(0).abs().max() < 1e-12


def test_tables_tell_predictions_from_measurements(tmp_path: Path) -> None:
    predicted = Measurement(contender="megatron_verl", size=LARGE, predicted_bytes=28 * 1024 * MIB)
    small = [measured("megatron_verl", SMALL, 300.0, [1.0, 2.0, 4.0]), measured("gemms", SMALL, None, [1.0])]
    report = report_of(*small, predicted)
    rows = {tuple(line.split()[:3]): line for line in report_text(report).splitlines() if "megatron_verl" in line}
    assert "predicted out of memory: 28.0 GiB" in rows["megatron_verl", "1000", "16384"]
    # Three products of the bound take 0.75 s of the median 2 s.
    assert rows["megatron_verl", "1000", "4096"].split()[3:] == (
        ["300", "1", "12", "1", "1024", "0.500", "2.000", "1.000-4.000", "38%"]
    )
    assert "nothing to compare" in limits_text(judge(report))
    write_memory_png(report, tmp_path / "memory.png")
    assert (tmp_path / "memory.png").read_bytes().startswith(b"\x89PNG")


def test_peak_of_resident_memory() -> None:
    """64 MiB that are gone again; the kernel counts in batches of pages (proc_pid_status(5): "inaccurate")."""
    memory = ResidentMemory()
    memory.begin()
    gone = torch.ones(64 * MIB // 4)
    del gone
    assert memory.peak_bytes() / MIB == pytest.approx(64, abs=2)


def test_collectives_that_pass_by_the_count_are_noticed() -> None:
    code = """
import os, tempfile, torch, torch.distributed as dist
import torch.distributed._functional_collectives as functional
from megarl_lab.bench.logprobs.counting import count_collectives
with tempfile.TemporaryDirectory() as directory:
    dist.init_process_group("gloo", init_method=f"file://{directory}/rendezvous", rank=0, world_size=1)
    with count_collectives() as count:
        dist.all_reduce(torch.ones(6))
        dist.broadcast(torch.ones(2, dtype=torch.float64), 0)
    print(count.traffic().num_collectives, count.traffic().num_bytes)
    try:
        with count_collectives():
            functional.wait_tensor(functional.all_reduce(torch.ones(3), "sum", dist.group.WORLD))
    except RuntimeError as error:
        print(error)
    dist.destroy_process_group()
"""
    environment = {"GLOO_SOCKET_IFNAME": "lo", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    root = Path(__file__).parents[3]
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, cwd=root, capture_output=True, text=True, check=True, timeout=60
    )
    counted, complaint = done.stdout.splitlines()
    assert counted == "2 40"
    assert complaint.startswith("1 collectives were not counted")


def test_time_left(capsys: pytest.CaptureFixture[str]) -> None:
    """A third of the work in 30 s leaves 60 s, whatever number of measurements that was."""
    sizes = ["--vocab", "1000", "--rows", "300", "--timed-rows", "300", "--rounds", "1"]
    settings = command.to_settings(command.parse(["--out", "x", "--contenders", "keep", *sizes]))
    now = [0.0]
    progress = CampaignProgress(settings, clock=lambda: now[0])
    now[0] = 30.0
    progress.advance((2 * CampaignProgress.START + 2 * 300_000) / 3, "some")
    assert capsys.readouterr().out == "[1/3] some; 1 min left\n"


def test_defaults_of_cpu() -> None:
    settings = command.to_settings(command.parse(["--out", "x"]))
    assert (settings.dtype, settings.world_size, settings.rounds, settings.itemsize) == ("float32", 2, 5, 4)
    assert not settings.main_grad
    assert {(size.vocab, size.rows) for size in settings.sizes} == {
        (vocab, rows) for vocab in (32768, 151936) for rows in (1024, 4096, 16384)
    }
    assert {size.hidden for size in settings.sizes} == {512}
    assert max(size.rows for size in settings.timed_sizes) == 4096
    assert all(name in CONTENDERS for names in DEFAULTS.values() for name in names)


def test_defaults_of_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "nvidia_devices", lambda: ["one device"])
    settings = command.to_settings(command.parse(["--out", "x", "--device", "cuda"]))
    assert (settings.dtype, settings.world_size, settings.itemsize) == ("bfloat16", 1, 2)
    assert settings.timed_sizes == [Size(vocab=151936, rows=rows, hidden=4096) for rows in (8192, 32768)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--device cuda", "no NVIDIA device is here"),
        ("--contenders lieger", "did you mean 'liger'"),
        ("--vocab 1001", "expected multiples"),
    ],
)
def test_bad_options(options: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "nvidia_devices", list)
    with pytest.raises(ConfigError, match=message):
        command.to_settings(command.parse(["--out", "x", *options.split()]))
