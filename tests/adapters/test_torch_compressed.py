"""The thread that takes buckets in turn, and its end."""

from __future__ import annotations

import threading

import pytest
import torch

from hvdtrain.adapters import torch_compressed
from hvdtrain.adapters.torch_compressed import Compressed
from hvdtrain.adapters.torch_reducer import Bucket
from hvdtrain.comm.links import LocalLink
from hvdtrain.compression.halves import Bfloat16
from hvdtrain.errors import HvdtrainError


class Stuck(Bfloat16):
    """Waits for a network that answers when told to."""

    def __init__(self) -> None:
        super().__init__()
        self.begun, self.answered = threading.Event(), threading.Event()
        self.keys: list[str] = []

    def exchange(self, key, tensors, link):
        self.keys.append(key)
        self.begun.set()
        assert self.answered.wait(20)
        if key == "bad":
            raise ConnectionError("the network is gone")


def bucket(name: str) -> Bucket:
    made = Bucket(name, {"weight": torch.nn.Parameter(torch.zeros(3))})
    made.take(0)
    return made


def test_after_an_error_no_bucket_is_sent_any_more():
    compressor = Stuck()
    carrier = Compressed(compressor, LocalLink())
    jobs = [carrier.begin(bucket(name)) for name in ("good", "bad", "queued")]
    compressor.answered.set()
    carrier.wait(jobs[0])
    for job in (*jobs[1:], carrier.begin(bucket("later"))):
        with pytest.raises(ConnectionError, match="is gone"):
            carrier.wait(job)
    carrier.close()
    assert compressor.keys == ["good", "bad"]


def test_the_end_drops_what_is_queued_and_does_not_wait_for_a_network_that_is_gone(monkeypatch):
    monkeypatch.setattr(torch_compressed, "_PATIENCE_S", 0.05)
    compressor = Stuck()
    carrier = Compressed(compressor, LocalLink())
    first, second = carrier.begin(bucket("first")), carrier.begin(bucket("second"))
    assert compressor.begun.wait(20)
    carrier.close()
    assert not carrier.is_done(first)
    compressor.answered.set()
    carrier.wait(first)
    with pytest.raises(HvdtrainError, match="closed"):
        carrier.wait(second)
    assert compressor.keys == ["first"]


def test_a_bucket_that_waits_for_the_network_does_not_hold_up_the_next_one():
    first, second = LocalLink(), LocalLink()
    answered = threading.Event()

    class Waits(Bfloat16):
        def exchange(self, key, tensors, link):
            assert link is {"0": first, "1": second, "2": first}[key]
            assert link is second or answered.wait(20)

    carrier = Compressed(Waits(), first, second)
    jobs = [carrier.begin(bucket(str(number))) for number in range(3)]
    carrier.wait(jobs[1])
    assert not carrier.is_done(jobs[0])
    answered.set()
    for job in jobs:
        carrier.wait(job)
    carrier.close()
    assert carrier.is_over
