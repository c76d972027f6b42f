"""Handles of device memory as JSON: they open what they were made of, and nothing else is taken for one."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.errors import WeightSyncError
from megarl.host.store import open_store
from megarl.sync.transport import cuda_ipc
from megarl.sync.transport.cuda_ipc import DeviceHandle, DeviceSegments
from megarl.sync.transport.rendezvous import SignedStore

# As torch gives them for a tensor of 96 bytes on device 0, with made-up handles.
MEMORY, COUNTER, EVENT = bytes(range(66)), b"/torch_4711_3_0", b"\xff" * 64
ARGUMENTS = (
    torch.Tensor, torch.Size([96]), (1,), 32, torch.storage.TypedStorage, torch.uint8, 0, MEMORY, 512, 1024, False,
    COUNTER, 5, EVENT, True,
)  # fmt: skip
HANDLE = DeviceHandle(
    num_bytes=96,
    tensor_offset=32,
    memory=MEMORY,
    storage_bytes=512,
    storage_offset=1024,
    counter=COUNTER,
    counter_offset=5,
    event=EVENT,
    waits=True,
)


def test_the_other_process_opens_with_the_same_arguments_on_its_own_device(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[Any, ...]] = []
    monkeypatch.setattr(cuda_ipc, "reduce_tensor", lambda tensor: ("never called", ARGUMENTS))
    monkeypatch.setattr(cuda_ipc, "rebuild_cuda_tensor", lambda *arguments: calls.append(arguments))
    handle = DeviceHandle.of(torch.empty(96, dtype=torch.uint8))
    assert handle == HANDLE
    DeviceHandle.decode(handle.encode(), 96).tensor_on(torch.device("cuda", 3))
    assert calls == [(*ARGUMENTS[:6], 3, *ARGUMENTS[7:])]


def test_what_torch_gives_has_the_parts_that_its_function_takes() -> None:
    """On this machine without a device: the names of the arguments, and how many there are."""
    code = cuda_ipc.rebuild_cuda_tensor.__code__
    assert code.co_varnames[: code.co_argcount] == (
        "tensor_cls", "tensor_size", "tensor_stride", "tensor_offset", "storage_cls", "dtype", "storage_device",
        "storage_handle", "storage_size_bytes", "storage_offset_bytes", "requires_grad", "ref_counter_handle",
        "ref_counter_offset", "event_handle", "event_sync_required",
    )  # fmt: skip
    assert len(ARGUMENTS) == code.co_argcount


def changed(**values: Any) -> str:
    return json.dumps(json.loads(HANDLE.encode()) | values)


def without(name: str) -> str:
    fields: Mapping[str, Any] = json.loads(HANDLE.encode())
    return json.dumps({key: value for key, value in fields.items() if key != name})


@pytest.mark.parametrize(
    "text",
    [
        "", "null", "[]", "{}", "gASVCAAAAAAAAAB9lC4=", without("event"), changed(function="os.system"),
        changed(num_bytes="96"), changed(num_bytes=96.0), changed(num_bytes=True), changed(num_bytes=95),
        changed(tensor_offset=-1), changed(tensor_offset=417), changed(storage_bytes=127), changed(storage_offset=None),
        changed(memory=""), changed(memory="Zm9"), changed(memory="é"), changed(memory=[1]),
        changed(memory="AAAA" * 1366),
        changed(counter=7), changed(waits=1), changed(waits="yes"),
    ],
)  # fmt: skip
def test_anything_else_is_no_handle(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even from a process of the run, as one of another version."""
    monkeypatch.setattr(cuda_ipc, "rebuild_cuda_tensor", lambda *_: pytest.fail("it was opened"))
    server = open_store("127.0.0.1")
    store = SignedStore(server, b"the run's", "here")
    store.set("a", text)
    with pytest.raises(WeightSyncError, match=r"cannot open the device memory a: .*same versions"):
        DeviceSegments(store, torch.device("cuda", 0), 5.0).open(Path("a"), 96)


@pytest.mark.parametrize("changes", [{"tensor_offset": 416}, {"storage_offset": 0, "waits": False}])
def test_what_fits_is_one(changes: Mapping[str, Any]) -> None:
    handle = DeviceHandle.decode(changed(**changes), 96)
    assert {name: getattr(handle, name) for name in changes} == changes
