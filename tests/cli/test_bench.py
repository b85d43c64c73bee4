from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from hvdtrain.bench import crowd, results
from hvdtrain.bench.results import Allreduce, Link, Loading, Steps
from hvdtrain.cli import bench_job, bench_show, main
from tests.bench.examples import ALLREDUCE, LINK, STEPS
from tests.support.harness import RECIPES, hvdtrain


@pytest.mark.parametrize(
    ("words", "message", "hint"),
    [
        (["allreduce", "-np", "1"], "an allreduce needs 2 ranks at least", "-np 2"),
        (["allreduce", "--sizes", "3x"], "'3x' is no size", "4, 64K or 16M"),
        (["allreduce", "--over", "mpi,nccl"], "there is no carrier 'nccl'", "known: mpi, shared, gloo, horovod"),
        (["allreduce", "--over", ","], "there is no carrier ','", "known: mpi"),
        (["allreduce", "--plot", "a.png"], "a.png does not end in .svg", "every browser"),
        (["link"], "a link has two ends, and this is 1 host", "-H node1,node2"),
        (["link", "-H", "a,b", "-np", "2"], "starts one rank on each host", "leave -np out"),
        (["step", "no.py"], "recipe 'no.py' does not exist", "check the path"),
        (["step", "no.py", "--exchange", "nccl"], "there is no exchange 'nccl'", "known: horovod, shared, auto"),
        (["step", "no.py", "--seconds", "inf"], "'inf' is not a number of seconds", "hvdtrain bench step"),
        (["loader", "no.py", "--set", "lr"], "--set takes NAME=VALUE", "--set lr=VALUE"),
        (["loader", "no.py", "--batch-size", "many"], "expected int", "hvdtrain train --help"),
    ],
)
def test_a_mistake_is_told_before_anything_starts(words, message, hint, capsys):
    assert main(["bench", *words]) == 2
    said = capsys.readouterr().err
    assert message in said
    assert hint in said


@pytest.mark.parametrize(
    "words",
    [
        ["allreduce", "--json", "no/a.json"],
        ["allreduce", "--plot", "no/a.svg"],
        ["link", "-np", "2", "--json", "."],
        ["step", f"{RECIPES}:linear", "--json", "no/a.json"],
        ["loader", f"{RECIPES}:linear", "--json", "no/a.json"],
    ],
)
def test_a_file_that_cannot_be_written_is_told_before_anything_starts(words, in_tmp, capsys, monkeypatch):
    monkeypatch.setattr(bench_job, "run", lambda *_: pytest.fail("something was started"))
    assert main(["bench", *words]) == 2
    assert f"{words[-1]} cannot be written: " in capsys.readouterr().err
    assert list(in_tmp.iterdir()) == []


def test_a_crowded_machine_is_told_at_the_start(capsys, monkeypatch):
    monkeypatch.setattr(crowd, "busy", lambda: 0.5)
    monkeypatch.setattr(bench_job, "run", lambda *_: 1)
    assert main(["bench", "allreduce", "-np", "40"]) == 1
    said = capsys.readouterr().err
    assert "Warning: other programs use 50% of this machine's processors: " in said
    assert "Warning: 40 ranks take turns on " in said


def test_links_between_hosts_crowd_no_machine_however_many_slots_it_has(capsys, monkeypatch):
    monkeypatch.setattr(crowd, "busy", lambda: 0.0)
    monkeypatch.setattr(bench_job, "run", lambda *_: 1)
    assert main(["bench", "link", "-H", "localhost:400,elsewhere:400"]) == 1
    assert "Warning: " not in capsys.readouterr().err


def test_no_summary_in_the_help_is_cut_off(capsys):
    assert main(["bench", "--help"]) == 0
    assert "..." not in capsys.readouterr().out.partition("Commands:")[2]


def test_the_loaders_help_has_no_option_of_the_exchange(capsys):
    assert main(["bench", "loader", "--help"]) == 0
    said = capsys.readouterr().out
    assert "--compression" not in said
    assert "without hosts 1)" in " ".join(said.split())


def test_of_one_round_there_is_no_range(capsys):
    one = replace(STEPS, steps=tuple(replace(step, rounds_s=(step.step.median_s,)) for step in STEPS.steps))
    bench_show.show(one)
    said = capsys.readouterr().out
    assert "rounds" not in said.splitlines()[1]
    assert "one round: it cannot tell a difference from the machine's moods" in said


def test_a_table_says_which_carrier_was_fastest_and_how_near_the_limit(capsys):
    bench_show.show(ALLREDUCE)
    lines = capsys.readouterr().out.splitlines()
    assert any(line.split()[:3] == ["4", "B", "mpi"] for line in lines)
    assert any("limit: memory" in line and "1.00 ms" in line for line in lines)
    assert "50%" in lines[2]


def test_links_are_shown_slowest_first(capsys):
    bench_show.show(LINK)
    said = capsys.readouterr().out
    assert said.index("100 MB/s") < said.index("1.00 GB/s")


@pytest.mark.parametrize(
    ("value", "text"), [(2.5e-6, "2.50 us"), (1.5e-4, "150 us"), (0.0123, "12.3 ms"), (1.5, "1.50 s"), (120.0, "120 s")]
)
def test_times_have_three_digits(value: float, text: str):
    assert bench_show.seconds(value) == text


@pytest.mark.ranks
def test_two_ranks_sum_over_every_carrier(tmp_path: Path):
    words = [
        "bench",
        "allreduce",
        "-np",
        "2",
        "-H",
        "localhost:2",
        "--sizes",
        "4,256K",
        "--json",
        "found.json",
        "--plot",
        "found.svg",
    ]
    done = hvdtrain(*words, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    report = results.read(tmp_path / "found.json")
    assert isinstance(report, Allreduce)
    assert report.left_out == {}
    assert {(each.carrier, each.bytes) for each in report.sums} == {
        (name, size) for name in ("mpi", "shared", "gloo", "horovod") for size in (4, 256 << 10)
    }
    assert [limit.bytes for limit in report.limits] == [256 << 10]
    assert all(each.timing.fastest_s <= each.timing.median_s and each.timing.count >= 5 for each in report.sums)
    assert len(ElementTree.parse(tmp_path / "found.svg").getroot()) > 20
    assert "256 KiB" in done.stdout


@pytest.mark.ranks
def test_what_cannot_carry_is_left_out_with_its_reason(tmp_path: Path):
    words = ["bench", "allreduce", "-np", "2", "--gloo", "--sizes", "4K", "--over", "mpi,shared,horovod", "--json", "-"]
    done = hvdtrain(*words, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    report = results.from_json(json.loads(done.stdout))
    assert isinstance(report, Allreduce)
    assert set(report.left_out) == {"mpi", "shared"}
    assert "leave --gloo out" in report.left_out["mpi"]
    assert report.carriers["horovod"].startswith("horovod.torch over Gloo")


@pytest.mark.ranks
def test_links_between_ranks_of_one_host(tmp_path: Path):
    done = hvdtrain("bench", "link", "-np", "2", "--json", "found.json", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    report = results.read(tmp_path / "found.json")
    assert isinstance(report, Link)
    assert [(route.source[-2:], route.target[-2:]) for route in report.routes] == [("/0", "/1"), ("/1", "/0")]
    assert all(route.latency_s > 0 and route.bytes_per_s > 0 for route in report.routes)


@pytest.mark.ranks
def test_a_recipes_step_alone_and_with_each_exchange(tmp_path: Path):
    words = ["bench", "step", f"{RECIPES}:torch", "-np", "2", "--rounds", "1", "--seconds", "0.2", "--json", "found.json"]
    done = hvdtrain(*words, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    report = results.read(tmp_path / "found.json")
    assert isinstance(report, Steps)
    assert [step.exchange for step in report.steps] == ["none", "horovod", "shared"]
    assert [step.exposed_s is None for step in report.steps] == [True, False, False]
    assert all(step.update_s and step.data_s + step.update_s < step.step.median_s for step in report.steps)
    assert (report.framework, report.batch_size, report.setup.ranks) == ("torch", 64, 2)


def test_a_recipes_loading_names_its_bottleneck(tmp_path: Path):
    words = ["bench", "loader", f"{RECIPES}:linear", "--json", "found.json"]
    done = hvdtrain(*words, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    report = results.read(tmp_path / "found.json")
    assert isinstance(report, Loading)
    assert min(report.source_per_s, report.loader_per_s, report.step_per_s) > 0
    assert "bottleneck" in done.stdout
