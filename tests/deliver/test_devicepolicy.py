"""What of a reader is decoded on a GPU, batch by batch, and when the memory for that is freed."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from h5async.config import ReaderConfig
from h5async.deliver import devicedecode
from h5async.deliver.device import NotDecoded
from h5async.deliver.devicepolicy import DevicePolicy
from h5async.errors import DeviceError
from h5async.fill.outcomes import FillOutcome
from h5async.order.requests import FillRequest

CHUNKS = SimpleNamespace(num_items=3)  # the plan of a field whose chunks go to the device encoded


class FakeDevice:
    """Device, slots and filler at once; notes what is given back."""

    def __init__(self, name="cuda:0"):
        self.name, self.free_nbytes, self.memory = name, 1 << 30, "memory"
        self.dropped = []

    def drop_decoders(self, slots):
        self.dropped.append(("decoders", len(slots)))

    def drop_encoded(self, slots):
        self.dropped.append(("memory", len(slots)))

    def transfer_seconds(self):
        return 0.0


def policy(monkeypatch, device, decode="auto", formats=("form",), obstacle=None):
    monkeypatch.setattr(devicedecode, "find_formats", lambda *_: (list(formats), obstacle))
    return DevicePolicy(ReaderConfig(hdf5_path="x.h5", decode=decode), device, {}, {}, 4, 1 << 20)


def request(serial, on_device):
    return FillRequest(0, serial, 0, serial, 4 * serial, on_device=on_device)


def outcome(*plans, is_resident=False):
    return FillOutcome(np.arange(4), (), encoded=plans, is_resident=is_resident)


def let_the_host_win(decides, device):
    """Have all batches measured, but leave one on its way that the device decodes."""
    begun = [(serial, decides.begin(serial)) for serial in range(9)]
    left = max(serial for serial, on_device in begun if on_device)
    for serial, on_device in begun:
        plans = (CHUNKS,) if on_device else (None,)
        decides.note(request(serial, on_device), outcome(*plans), device, 2.0 if on_device else 1.0)
        if serial != left:
            decides.end(request(serial, on_device), [device] * 2, device)
    return left


def test_memory_is_given_back_once_and_when_no_batch_is_left_that_may_need_it(monkeypatch):
    device = FakeDevice()
    decides = policy(monkeypatch, device)
    left = let_the_host_win(decides, device)
    assert decides.sentence.startswith("host: a batch takes")
    assert not decides.begin(100)
    decides.end(request(100, False), [device] * 2, device)
    assert not device.dropped, f"batch {left} may need it"
    decides.end(request(left, True), [device] * 2, device)
    assert device.dropped == [("decoders", 2), ("memory", 2)]
    decides.end(request(101, False), [device] * 2, device)
    assert len(device.dropped) == 2


@pytest.mark.parametrize("decode", ["device", "host"])
def test_nothing_is_given_back_where_nothing_was_measured(monkeypatch, decode):
    device = FakeDevice()
    obstacle = 'decode="host"' if decode == "host" else None
    decides = policy(monkeypatch, device, decode, (None if obstacle else "form",), obstacle)
    for serial in range(20):
        assert decides.begin(serial) == (decode == "device")
        decides.end(request(serial, decode == "device"), [device], device)
    assert not device.dropped


def test_chunks_that_the_device_decoded_are_counted(monkeypatch):
    device = FakeDevice()
    decides = policy(monkeypatch, device)
    decides.note(request(0, False), outcome(None, None), device, 1.0)
    decides.note(request(1, True), outcome(CHUNKS, None, CHUNKS), device, 1.0)
    assert decides.num_chunks == 6


def test_only_what_failed_with_encoded_chunks_is_left_to_the_host(monkeypatch):
    decides = policy(monkeypatch, FakeDevice())
    bad = ValueError("bad")
    assert not decides.leaves_to_host(outcome(CHUNKS), None)
    assert not decides.leaves_to_host(outcome(None), bad)
    assert "left to the host" not in decides.sentence
    assert decides.leaves_to_host(outcome(CHUNKS), bad)
    assert decides.leaves_to_host(outcome(None), NotDecoded("odd"))
    assert "2 batches meant for it were left to the host" in decides.sentence


def test_what_was_meant_for_the_device_but_read_decoded_is_a_fallback(monkeypatch):
    device = FakeDevice()
    decides = policy(monkeypatch, device)
    decides.note(request(0, True), outcome(None, is_resident=True), device, 1.0)
    assert "left to the host" not in decides.sentence, "it was in the cache"
    decides.note(request(1, True), outcome(None), device, 1.0)
    assert "1 batches meant for it were left to the host" in decides.sentence


def test_without_a_gpu_the_host_decodes(monkeypatch):
    decides = policy(monkeypatch, FakeDevice("cpu"))
    assert decides.sentence == "host: there is no GPU"
    assert not decides.begin(0)
    with pytest.raises(DeviceError, match="needs a GPU, and none was found"):
        policy(monkeypatch, FakeDevice("cpu"), "device")
