"""Small tensors between the host and a GPU arrive as they were sent."""

from __future__ import annotations

import pytest
import torch

from dqnfed.accel.transfer import PinnedReadback, to_device_async

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
DEVICES = ["cpu", pytest.param("cuda", marks=needs_gpu)]


@pytest.mark.parametrize("device", DEVICES)
def test_what_was_read_back_is_not_overwritten_by_the_next(device: str) -> None:
    there, readback = torch.zeros(5, device=device), PinnedReadback()
    arrived = []
    for k in range(20):
        wait = readback.start(there.fill_(k))
        there.fill_(-1.0)  # the copy was taken before
        arrived.append(wait())
    assert [values.tolist() for values in arrived] == [[float(k)] * 5 for k in range(20)]


@pytest.mark.parametrize("device", DEVICES)
def test_transfers_that_nobody_has_waited_for_do_not_share_memory(device: str) -> None:
    """The first question to a round's replies may come after the next round was started."""
    there, readback = torch.zeros(5, device=device), PinnedReadback()
    waits = [readback.start(there.fill_(k)) for k in range(4)]
    assert [wait().tolist() for wait in reversed(waits)] == [[float(k)] * 5 for k in (3, 2, 1, 0)]
    assert [wait().tolist() for wait in waits] == [[float(k)] * 5 for k in range(4)]  # asked again


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
def test_on_the_host_a_tensor_stays_where_it_is(dtype: torch.dtype) -> None:
    host = torch.arange(6, dtype=torch.float64).view(2, 3)
    found = to_device_async(torch.device("cpu"), host, dtype)
    assert found.dtype == dtype
    assert torch.equal(found, host.to(dtype))


@needs_gpu
@pytest.mark.parametrize("dtype", [torch.int64, torch.float32, torch.bool, torch.bfloat16])
def test_what_is_sent_to_a_gpu_is_not_overwritten_by_what_is_sent_later(dtype: torch.dtype) -> None:
    """More than a slab of pinned memory holds, while the GPU is busy."""
    busy = torch.rand(4000, 4000, device="cuda")
    sent = []
    for k in range(300):
        if k % 50 == 0:
            busy = busy @ busy / 1000
        host = torch.full((40, 50), k % 256, dtype=torch.float32).to(dtype)
        sent.append(to_device_async(torch.device("cuda"), host))
    for k, there in enumerate(sent):
        assert torch.equal(there.cpu(), torch.full((40, 50), k % 256, dtype=torch.float32).to(dtype))
