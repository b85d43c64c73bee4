"""Ranks against Horovod's own elastic driver, in threads: who is slow, dies or is left out holds up or ends nobody else."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator

import pytest

from hvdtrain.comm import driver

pytest.importorskip("horovod")


class Job:
    """A driver, and workers that meet as they are told: ``meet(host)`` lets one ask for its next place."""

    def __init__(self, hosts: dict[str, int]) -> None:
        from horovod.runner.elastic.discovery import FixedHosts
        from horovod.runner.elastic.driver import ElasticDriver
        from horovod.runner.elastic.rendezvous import create_rendezvous_handler
        from horovod.runner.http.http_server import RendezvousServer

        self.server = server = RendezvousServer()
        self.hosts = FixedHosts(hosts)
        self.driver = ElasticDriver(server, self.hosts, 1, 4, timeout=20)
        self.port = server.start(create_rendezvous_handler(self.driver))
        self.orders: dict[str, queue.Queue[str]] = {host: queue.Queue() for host in "abcd"}
        self.places: queue.Queue[tuple[str, str]] = queue.Queue()
        self.started: set[str] = set()

    def start(self, number: int) -> None:
        self.driver.wait_for_available_slots(number)
        self.driver.start(number, self._work)

    def _work(self, slot, events) -> tuple[int, float]:
        self.started.add(slot.hostname)
        environ = {
            "HOROVOD_GLOO_RENDEZVOUS_ADDR": "127.0.0.1", "HOROVOD_GLOO_RENDEZVOUS_PORT": str(self.port),
            "HOROVOD_HOSTNAME": slot.hostname, "HOROVOD_LOCAL_RANK": str(slot.local_rank),
            "HOROVOD_RANK": str(slot.rank), "HOROVOD_SIZE": str(slot.size),
        }  # fmt: skip
        again = False
        while (order := self.orders[slot.hostname].get()) == "meet":
            try:
                driver.meet(environ, again=again)
                self.places.put((slot.hostname, f"{environ['HOROVOD_RANK']}/{environ['HOROVOD_SIZE']}"))
            except driver.LeftOutError:
                self.places.put((slot.hostname, "left out"))
            again = True
        return int(order), time.time()

    def meet(self, hosts: str, *, but_first: str = "") -> dict[str, str]:
        """Let these workers meet (the ``but_first`` half a second later); what each of them got."""
        for host in hosts:
            if host not in but_first:
                self.orders[host].put("meet")
        if but_first:
            time.sleep(0.5)
            assert self.places.empty(), "some did not wait for the others"
            for host in but_first:
                self.orders[host].put("meet")
        return dict(self.places.get(timeout=20) for _ in hosts)

    def wait_for(self, host: str) -> None:
        deadline = time.monotonic() + 10
        while host not in self.started:
            assert time.monotonic() < deadline
            time.sleep(0.02)

    def close(self) -> None:
        for orders in self.orders.values():
            orders.put("0")
        self.driver.stop()
        self.server._httpd.server_close()


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Iterator[Job]:
    monkeypatch.setattr(driver, "PATIENCE_S", 0.2)  # so that slow ranks are late for the first decision
    made = Job({"a": 1, "b": 1})
    made.start(2)
    yield made
    made.close()


def sizes(places: dict[str, str]) -> list[str]:
    return sorted(places.values())


def test_nobody_goes_on_before_the_slowest_is_ready(job: Job):
    assert sizes(job.meet("ab", but_first="b")) == ["0/2", "1/2"]


def test_a_host_joins_however_long_its_rank_takes_to_start_and_leaves_again(job: Job):
    job.meet("ab")
    job.hosts.set({"a": 1, "b": 1, "c": 1})
    time.sleep(1.2)  # until the driver has looked
    assert sizes(job.meet("abc", but_first="c")) == ["0/3", "1/3", "2/3"]
    job.hosts.set({"a": 1, "b": 1})
    time.sleep(1.2)
    places = job.meet("abc")
    assert places.pop("c") == "left out"
    assert sizes(places) == ["0/2", "1/2"]


def test_the_others_go_on_when_a_rank_dies_and_when_one_dies_while_it_starts(job: Job):
    job.meet("ab")
    job.hosts.set({"a": 1, "b": 1, "c": 1})
    time.sleep(1.2)
    answers: list[dict[str, str]] = []
    meeting = threading.Thread(target=lambda: answers.append(job.meet("ab")))
    meeting.start()
    job.wait_for("c")
    job.orders["c"].put("1")
    meeting.join(20)
    assert sizes(answers[0]) == ["0/2", "1/2"]
    job.orders["b"].put("137")
    assert job.meet("a") == {"a": "0/1"}


def test_a_list_of_hosts_may_be_empty_for_a_while(job: Job):
    job.meet("ab")
    for hosts in ({"a": 1}, {}):
        job.hosts.set(hosts)
        time.sleep(1.2)
    meeting: list[dict[str, str]] = []
    waiting = threading.Thread(target=lambda: meeting.append(job.meet("ab")))
    waiting.start()
    time.sleep(0.5)
    assert not meeting, "they went on without hosts"
    job.hosts.set({"a": 1, "c": 1})
    job.wait_for("c")
    job.orders["c"].put("meet")
    waiting.join(20)
    places = {**meeting[0], **dict([job.places.get(timeout=5)])}
    assert places.pop("b") == "left out"
    assert sizes(places) == ["0/2", "1/2"]  # the driver has forgotten who came first
