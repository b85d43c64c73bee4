"""Requests to end a run in order."""

from __future__ import annotations

import os
import signal
import time

import pytest

from hvdtrain import stops
from hvdtrain.config import seconds
from hvdtrain.progress import HERE
from hvdtrain.stops import StopNow, Stops


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("90", 90),
        ("90s", 90),
        ("1.5h", 5400),
        ("30m", 1800),
        ("1h30m", 5400),
        ("2d", 172800),
        ("1:30:00", 5400),
        ("05:00", 300),
        ("1-12:00:00", 129600),
        (" 2H ", 7200),
    ],
)
def test_durations(text, expected):
    assert seconds(text) == expected


@pytest.mark.parametrize("text", ["", "h", "2x", "-5", "0", "1:2:3:4", "1h:30", "nan", "inf", "s30", "0s", "1 h"])
def test_what_is_no_duration(text):
    with pytest.raises(ValueError, match=r"expected a time|must be more than 0"):
        seconds(text)


@pytest.fixture
def training():
    HERE.begin()
    HERE.training = True
    yield
    HERE.begin()


@pytest.mark.usefixtures("training")
@pytest.mark.parametrize(("number", "reason"), [(signal.SIGTERM, "SIGTERM"), (signal.SIGUSR1, "on request")])
def test_a_signal_is_noted_once_and_kept(number, reason):
    stops = Stops()
    with stops.listening():
        assert stops.reason == ""
        os.kill(os.getpid(), number)
        os.kill(os.getpid(), signal.SIGUSR1)
        assert stops.reason == reason
    assert signal.getsignal(number) == signal.SIG_DFL


@pytest.mark.usefixtures("training")
def test_a_second_sigterm_does_not_wait_for_a_vote(monkeypatch):
    with Stops().listening():
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)  # one request that reached us twice
        monkeypatch.setattr(stops, "_ONE_S", 0.0)
        with pytest.raises(StopNow, match="second time"):
            os.kill(os.getpid(), signal.SIGTERM)


def test_before_training_there_is_nothing_to_wait_for():
    HERE.begin()
    with Stops().listening(), pytest.raises(StopNow, match=r"stopped \(SIGTERM\) in phase") as caught:
        os.kill(os.getpid(), signal.SIGTERM)
    assert caught.value.exit_code == 75


def test_a_time_limit():
    assert Stops(1000).reason == ""
    assert Stops(0).reason == "--max-time 0 s is over"


@pytest.mark.usefixtures("training")
def test_when_all_is_saved_signals_change_nothing():
    before = signal.getsignal(signal.SIGTERM)
    stops_ = Stops()
    try:
        with stops_.listening():
            stops_.met()
            os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)  # nor while the process ends
        assert stops_.reason == ""
    finally:
        signal.signal(signal.SIGTERM, before)
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)


@pytest.mark.usefixtures("training")
def test_a_copy_of_the_process_dies_of_the_signal():
    with Stops().listening():
        child = os.fork()
        if child == 0:
            os.kill(os.getpid(), signal.SIGTERM)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM


def test_the_time_limit_counts_from_where_the_job_began_not_from_a_restart():
    assert Stops(1000, since=time.time() - 999).reason == ""
    assert Stops(1000, since=time.time() - 1001).reason == "--max-time 1000 s is over"
