"""Our safetensors files against the safetensors library, and what is refused."""

import json
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megarl.errors import ConfigError
from megarl.weights.safetensors_headers import check_tensors, model_files
from megarl.weights.safetensors_map import (
    TensorSpec,
    create_file,
    create_model_files,
    map_model,
    map_tensors,
    plan_files,
    read_specs,
    write_tensors,
)

TENSORS = {
    "a": torch.arange(6, dtype=torch.float32).view(2, 3) - 2.5,
    "b": torch.tensor([1.5, -0.0, 3e38], dtype=torch.bfloat16),
    "c": torch.tensor([[7]], dtype=torch.uint8),
    "d": torch.arange(4, dtype=torch.int64) - 2,
    "e": torch.tensor(0.25, dtype=torch.float64),
    "f": torch.tensor([65504.0], dtype=torch.float16),
    "g": torch.tensor([-1], dtype=torch.int32),
    "empty": torch.zeros(0, 3, dtype=torch.float32),
}


def specs_of(tensors: dict[str, torch.Tensor]) -> dict[str, TensorSpec]:
    return {name: TensorSpec(shape=tuple(t.shape), dtype=t.dtype) for name, t in tensors.items()}


def assert_same(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (got[name].dtype, got[name].shape) == (tensor.dtype, tensor.shape), name
        assert raw_bytes(got[name]) == raw_bytes(tensor), name


def raw_bytes(tensor: torch.Tensor) -> list[int]:
    return tensor.reshape(-1).view(torch.uint8).tolist()


def test_reads_what_the_library_writes(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    save_file(TENSORS, path, metadata={"format": "pt"})
    assert_same(map_tensors(path), TENSORS)
    assert read_specs(path) == specs_of(TENSORS)


def test_the_library_reads_what_is_written(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    create_file(path, specs_of(TENSORS))
    assert_same(load_file(path), {name: torch.zeros_like(t) for name, t in TENSORS.items()})
    # Two maps, as two processes would have, each with its own part.
    first, second = (map_tensors(path, writable=True) for _ in range(2))
    for name, tensor in TENSORS.items():
        (first if name in "abc" else second)[name].copy_(tensor)
    assert_same(load_file(path), TENSORS)


def test_a_read_only_map_does_not_change_the_file(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    save_file(TENSORS, path)
    for tensor in map_tensors(path).values():
        tensor.zero_()
    assert_same(load_file(path), TENSORS)


def test_data_at_odd_offsets(tmp_path: Path) -> None:
    """The format allows any offset; headers of odd length occur in the wild."""
    values = torch.tensor([1.0, -2.0, 3.5])
    header = json.dumps({"x": {"dtype": "F32", "shape": [3], "data_offsets": [0, 12]}}).encode()
    header += b" " * ((5 - len(header)) % 8)
    path = tmp_path / "odd.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header + values.numpy().tobytes())
    assert len(header) % 4 == 1
    assert torch.equal(map_tensors(path)["x"], values)


def test_truncated_files_are_named(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    save_file({"late": torch.ones(100)}, path)
    whole = path.read_bytes()
    for kept, message in (
        (len(whole) - 4, f"tensor late ends at byte {len(whole)} of {len(whole) - 4}; copy the model again"),
        (20, "header of .* bytes exceeds the file"),
        (3, "not a safetensors file: 3 bytes; copy the model again"),
    ):
        path.write_bytes(whole[:kept])
        with pytest.raises(ConfigError, match=message):
            map_tensors(path)


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (b"not json", r"x\.safetensors: not a safetensors file: Expecting value: .*; copy the model again"),
        (
            b'{"x": {"dtype": "F4", "shape": [1], "data_offsets": [0, 1]}}',
            r"tensor x has type F4, expected one of \['BF16'",
        ),
    ],
)
def test_headers_that_cannot_be_read(tmp_path: Path, header: bytes, message: str) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header + b"\0")
    for read in (map_tensors, read_specs):
        with pytest.raises(ConfigError, match=message):
            read(path)


def test_space_is_reserved_before_anything_is_written(tmp_path: Path) -> None:
    """Through a memory map a full disk would be a killed process."""
    path = tmp_path / "x.safetensors"
    create_file(path, floats(a=1 << 18))
    assert path.stat().st_blocks * 512 >= 1 << 20
    with pytest.raises(ConfigError, match=r"cannot reserve 4294967296\.00 GiB for .*x\.safetensors"):
        create_file(path, floats(a=1 << 60))
    assert not path.exists()


def floats(**lengths: int) -> dict[str, TensorSpec]:
    return {name: TensorSpec(shape=(n,), dtype=torch.float32) for name, n in lengths.items()}


def test_plan_fills_files_in_order() -> None:
    specs = floats(a=2, b=2, c=1, d=9, e=1)
    # 8 + 8 bytes fit in 16; c would be 20; d alone exceeds the limit.
    plan = plan_files(specs, max_bytes=16)
    assert [list(group) for group in plan.values()] == [["a", "b"], ["c"], ["d"], ["e"]]
    assert next(iter(plan)) == "model-00001-of-00004.safetensors"
    assert list(plan_files(specs)) == ["model.safetensors"]


def test_model_of_several_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from megarl.weights import safetensors_map

    specs = floats(a=2, b=2, c=1)
    monkeypatch.setattr(safetensors_map, "plan_files", lambda s: plan_files(s, max_bytes=16))
    files = create_model_files(tmp_path, specs)
    assert [file.name for file in files] == ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    assert json.loads((tmp_path / "model.safetensors.index.json").read_text()) == {
        "metadata": {"total_size": 20},
        "weight_map": {"a": files[0].name, "b": files[0].name, "c": files[1].name},
    }
    assert model_files(tmp_path) == files
    map_model(files, writable=True)["c"].fill_(5.0)
    assert {name: tensor.tolist() for name, tensor in map_model(files).items()} == {"a": [0, 0], "b": [0, 0], "c": [5]}
    check_tensors(tmp_path, {"a": (2,), "b": (2,), "c": (1,)})
    files[1].unlink()
    with pytest.raises(ConfigError, match=r"model-00002-of-00002\.safetensors does not exist"):
        model_files(tmp_path)


def test_tensors_that_are_there_twice_must_be_equal(tmp_path: Path) -> None:
    for name, value in (("a", 0.0), ("b", 0.0), ("c", 1.0)):
        write_tensors(tmp_path / f"{name}.safetensors", {"w": torch.full((2,), value), name: torch.ones(1)})
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"w": "a.safetensors", "b": "b.safetensors"}}))
    check_tensors(tmp_path, {"w": (2,), "a": (1,), "b": (1,)})
    index.write_text(json.dumps({"weight_map": {"w": "a.safetensors", "c": "c.safetensors"}}))
    with pytest.raises(ConfigError, match=r"tensor w is in a\.safetensors and in c\.safetensors, and they differ"):
        check_tensors(tmp_path, {"w": (2,), "a": (1,), "c": (1,)})
    # The index says which of the two is meant; not every program heeds it.
    with pytest.raises(ConfigError, match=r"index\.json names a\.safetensors, .*: remove it from the other file"):
        check_tensors(tmp_path, {"w": (2,), "a": (1,), "c": (1,)})
    create_model_files(tmp_path, floats(w=2))
    with pytest.raises(ConfigError, match=r"has model\.safetensors beside the files of model\.safetensors\.index"):
        model_files(tmp_path)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.uint8])
def test_weights_of_integers_are_refused(dtype: torch.dtype, tmp_path: Path) -> None:
    """Files of quantised models may have tensors of the expected shapes, which stand for other numbers."""
    write_tensors(tmp_path / "model.safetensors", {"w": torch.ones(2), "v": torch.ones(2, dtype=dtype)})
    check_tensors(tmp_path, {"w": (2,)}, ignored=("v",))
    with pytest.raises(ConfigError, match=r"v is stored as u?int\d+ \(1 such tensors\), as in quantised models"):
        check_tensors(tmp_path, {"w": (2,), "v": (2,)})


def test_check_names_the_differences(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model\.safetensors does not exist"):
        check_tensors(tmp_path, {})
    create_model_files(tmp_path, floats(a=2, head=3))
    check_tensors(tmp_path, {"a": (2,)}, ignored=["head"])
    check_tensors(tmp_path, {"a": (2,), "head": (3,), "score": (1,)}, optional=["score", "a"])
    with pytest.raises(ConfigError, match=r"missing \['b'\] \(1\), unknown \['head'\] \(1\)"):
        check_tensors(tmp_path, {"a": (2,), "b": (1,)})
    with pytest.raises(ConfigError, match=r"a has shape \(2,\), config\.json implies \(1, 2\)"):
        check_tensors(tmp_path, {"a": (1, 2), "head": (3,)})
