# Copyright: sglang-fleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Profiles compared on real SGLang, and what follows from it: a report, a date, and metrics by their names."""

from __future__ import annotations

import json
import re
import sys
import threading

import pytest
import requests
import yaml
from helpers.compare import holder

from ..conftest import Fleet, free_ports

pytestmark = pytest.mark.engine

SERVER = "here-cpu0"
# Two profiles that differ in nothing but the requests that they run at once, one with a context of its own, and one
# that no engine takes.
PROFILES = {
    "wide": {"args": {"enable-metrics": True, "max-running-requests": 16, "mem-fraction-static": 0.85}},
    "narrow": {"extends": "wide", "args": {"max-running-requests": 1}},
    "small": {"extends": "wide", "args": {"context-length": 64}},
    "broken": {"extends": "wide", "args": {"no-such-flag": 1}},
}
METRIC = re.compile(r"sglang:[a-z0-9_]+")


@pytest.fixture(scope="module")
def fleet(engine, tmp_path_factory):
    """Two servers of one kind, of which the first runs profile narrow."""
    venv, model = engine
    first, second = free_ports(2)
    fleet = Fleet(
        tmp_path_factory.mktemp("compare"),
        {
            "here": {
                "ansible_connection": "local",
                "ansible_python_interpreter": sys.executable,
                "servers": [{"port": first}, {"port": second}],
                "model": "tiny",
                "sglang_engine_device": "cpu",
                "sglang_engine_release": "0.5.23",
                "sglang_engine_venv": str(venv),
                "sglang_compare_shapes": {"short": {"input_tokens": 8, "output_tokens": 16}},
                "sglang_compare_min_prompts": 4,
            }
        },
    )
    fleet.url = f"http://127.0.0.1:{first}"
    fleet.options = {
        "sglang_root": str(fleet.root),
        "sglang_models": {"tiny": {"path": str(model), "served_name": "tiny"}},
        "sglang_profiles": PROFILES,
    }
    deployed = fleet.run("deploy", cmdline=f"--limit {SERVER}", profile="narrow", benchmark=False, prometheus=True)
    assert deployed.rc == 0, deployed.stdout
    yield fleet
    stopped = fleet.run("stop", sglang_stop_timeout=5)
    assert stopped.rc == 0, stopped.stdout
    assert list((fleet.artifacts / "prometheus/targets").iterdir()) == [], "what is stopped on purpose is no alarm"


def compare(fleet, **options):
    asked = {"profiles": ["narrow", "wide"], "concurrencies": [1, 4], "repeats": 1, **options}
    return fleet.run("compare", **asked)


def records(fleet, kind):
    found = [json.loads(path.read_text()) for path in sorted((fleet.artifacts / "compare" / SERVER).glob("*.json"))]
    return [record for record in found if record["kind"] == kind]


def stale_target(fleet):
    """A target with the profile of another day."""
    path = fleet.artifacts / f"prometheus/targets/{SERVER}.json"
    path.write_text(path.read_text().replace('"narrow"', '"older"'))
    assert json.loads(path.read_text())[0]["labels"]["profile"] == "older"
    return path


def runs_now(fleet):
    state = json.loads((fleet.root / "run/sglang_cpu0.json").read_text())
    return state["profile"], state["argv"], state["env"], state["launched_at"]


@pytest.fixture(scope="module")
def compared(fleet):
    before = runs_now(fleet)
    result = compare(fleet, profiles=["broken", "narrow", "wide"])
    return before, result


def test_every_profile_is_measured_and_one_that_cannot_start_is_told(fleet, compared):
    _before, result = compared
    assert result.rc == 2 and "no-such-flag" in result.stdout, result.stdout
    measured = records(fleet, "measured")
    assert [(one["profile"], one["outcome"], [run["concurrency"] for run in one["runs"]]) for one in measured] == [
        ("narrow", "measured", [1, 4]),
        ("wide", "measured", [1, 4]),
    ]
    assert [one["boot"]["cap"] for one in measured] == [1, 16]
    assert all("import" in one["boot"]["stages"] and one["boot"]["ready_s"] > 0 for one in measured)
    (refused,) = records(fleet, "refused")
    assert (refused["profile"], refused["release"]) == ("broken", "0.5.23")
    assert "unrecognized arguments: --no-such-flag" in refused["error"]
    # One of a kind is measured; the other server was not touched.
    assert not (fleet.root / "run/sglang_cpu1.json").exists()
    report = result.tasks["Make the report"][SERVER]
    (comparison,) = report["comparisons"]
    at_four = comparison["crossover"]["winners"][1]
    assert (at_four["concurrency"], at_four["profile"]) == (4, "wide")  # four at once beat one after another
    assert (fleet.artifacts / "compare/report.html").read_text().startswith("<!DOCTYPE html>")


def test_our_figures_are_those_of_bench_serving(fleet, compared):
    for record in records(fleet, "measured"):
        lines = (fleet.artifacts / record["raw"]).read_text().splitlines()
        own = {one["max_concurrency"]: one for one in map(json.loads, lines)}
        assert len(record["runs"]) == len(own) == 2
        for run in record["runs"]:
            theirs = own[run["concurrency"]]
            assert run["output_tok_s"] == round(theirs["output_throughput"], 3)
            assert run["ttft_ms"] == {
                "median": round(theirs["median_ttft_ms"], 3), "p99": round(theirs["p99_ttft_ms"], 3),
            }  # fmt: skip
            assert run["tpot_ms"]["median"] == round(theirs["median_tpot_ms"], 3)


def test_what_ran_before_is_put_back(fleet, compared):
    before, _result = compared
    assert runs_now(fleet)[:3] == before[:3]
    assert requests.get(f"{fleet.url}/health", timeout=30).status_code == 200
    (begin,), (end,) = records(fleet, "begin"), records(fleet, "end")
    assert (begin["before"]["profile"], end["put_back"]) == ("narrow", True)
    # Started anew after profile wide, and not found as it was left.
    assert runs_now(fleet)[3] > before[3]


def test_metrics_are_called_what_dashboard_and_alerts_call_them(fleet, compared):
    home = fleet.artifacts / "prometheus"
    (target,) = json.loads((home / f"targets/{SERVER}.json").read_text())
    assert target["labels"] == {"node": "here", "server": SERVER, "profile": "narrow"}
    assert [path.name for path in (home / "targets").iterdir()] == [f"{SERVER}.json"]
    # A streamed answer of several tokens, after which SGLang has all its histograms.
    body = {"text": "The quick", "stream": True, "sampling_params": {"max_new_tokens": 64, "ignore_eos": True}}
    requests.post(f"{fleet.url}/generate", json=body, timeout=60)
    text = requests.get(f"http://{target['targets'][0]}/metrics", timeout=30).text
    there = {line.partition("{")[0] for line in text.splitlines() if line.startswith("sglang:")}
    used = set()
    for name in ("alerts.yml", "dashboard.json"):
        used |= set(METRIC.findall((home / name).read_text()))
    assert used and used <= there
    assert yaml.safe_load((home / "prometheus.yml").read_text())["rule_files"] == ["alerts.yml"]


def test_a_later_deploy_keeps_the_target_true(fleet, compared):
    target = stale_target(fleet)
    deployed = fleet.run("deploy", cmdline=f"--limit {SERVER}", profile="narrow", benchmark=False)
    assert deployed.rc == 0, deployed.stdout
    checked = deployed.tasks["Look on the node whether the server can be started"][SERVER]
    assert checked["would_change"] is False, "what was put back is what a deploy would start, to its script"
    assert json.loads(target.read_text())[0]["labels"] == {"node": "here", "server": SERVER, "profile": "narrow"}


def test_prompts_of_a_file_are_sent(fleet, compared, tmp_path):
    lines = [{"prompt": f"The quick brown fox jumps {n} times"} for n in range(3)]
    lines.append({"messages": [{"role": "user", "content": "Why does the fox jump?"}]})
    path = tmp_path / "job.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    given = {"sglang_benchmark_prompts": str(path), "sglang_benchmark_min_prompts": 4, "sglang_benchmark_output_tokens": 16}
    result = fleet.run("benchmark", cmdline=f"--limit {SERVER}", sglang_benchmark_concurrencies=[1], **given)
    assert result.rc == 0, result.stdout
    kept = [json.loads(one.read_text()) for one in (fleet.artifacts / "benchmarks" / SERVER).glob("*.json")]
    (record,) = [one for one in kept if "comparison" not in one["labels"]]
    (run,) = record["runs"]
    assert (record["outcome"], run["completed"], run["failed"], run["output_tokens"]) == ("measured", 4, 0, 64)
    assert len(record["asked"]["prompts_sha256"]) == 64
    assert not (fleet.root / "benchmarks" / SERVER / "prompts.jsonl").exists()


@pytest.fixture
def long_prompt(tmp_path):
    """A file of prompts whose third line is the longest, and its messages."""
    messages = [{"role": "user", "content": "Why does the fox jump over it, and again, and again, and again?"}]
    path = tmp_path / "long.jsonl"
    lines = [{"prompt": "The quick brown fox"}] * 4
    path.write_text("\n\n".join(map(json.dumps, [lines[0], {"messages": messages}, *lines[1:]])))
    return path, messages


def test_a_prompt_longer_than_a_context_is_refused_before_anything_is_touched(fleet, compared, long_prompt):
    path, messages = long_prompt
    before, kept = runs_now(fleet), list((fleet.artifacts / "compare").rglob("*.json"))
    body = {"model": "tiny", "messages": messages, "max_tokens": 1}
    answer = requests.post(f"{fleet.url}/v1/chat/completions", json=body, timeout=60).json()
    result = compare(fleet, profiles=["narrow", "small"], concurrencies=[1], prompts=str(path))
    assert result.rc != 0
    told = result.tasks["Refuse requests that are longer than a context"][SERVER]
    assert (told["line"], told["context"]) == (3, 4096)
    tokens = told["tokens"]
    assert tokens == answer["usage"]["prompt_tokens"], "as the server counts them"
    assert told["msg"].startswith(
        f"line 3 of {path}, the longest, has {tokens} tokens and 16 are asked for as output, {tokens + 16} together,"
        " but profile small has a context of 64: "
    )
    assert runs_now(fleet) == before
    assert list((fleet.artifacts / "compare").rglob("*.json")) == kept
    assert not (fleet.root / "benchmarks" / SERVER / "prompts.jsonl").exists()
    assert not (fleet.root / "run/sglang_cpu0.compare.lock.json").exists()


@pytest.mark.parametrize("playbook", ["benchmark", "deploy"])
def test_a_benchmark_longer_than_the_context_is_refused_before_anything_is_touched(fleet, compared, long_prompt, playbook):
    path, _messages = long_prompt
    before, kept = runs_now(fleet), list((fleet.artifacts / "benchmarks").rglob("*"))
    # What a deploy would start would replace what runs.
    given = {
        "benchmark": {"sglang_benchmark_prompts": str(path), "sglang_benchmark_output_tokens": 4090},
        "deploy": {"profile": "small", "replace": True, "sglang_benchmark_output_tokens": 16},
    }
    result = fleet.run(playbook, cmdline=f"--limit {SERVER}", **given[playbook])
    assert result.rc != 0
    said = result.tasks["Refuse requests that are longer than a context"][SERVER]["msg"]
    assert said.startswith(
        {"benchmark": f"line 3 of {path}, the longest, has ", "deploy": "each request of random tokens has 128 "}[playbook]
    )
    profile, context = {"benchmark": ("narrow", "4096, as the model"), "deploy": ("small", "64")}[playbook]
    assert f" together, but profile {profile} has a context of {context}: " in said
    assert runs_now(fleet) == before
    assert list((fleet.artifacts / "benchmarks").rglob("*")) == kept


def test_a_job_is_dated_from_what_was_measured_and_from_what_runs(fleet, compared):
    job = {"samples": 1000, "output_tokens": 100}
    measured = fleet.run("eta", profile="wide", **job)
    assert measured.rc == 0, measured.stdout
    told = measured.tasks["Work out when the job is done"][SERVER]
    (wide,) = [record for record in records(fleet, "measured") if record["profile"] == "wide"]
    best = max(run["output_tok_s"] for run in wide["runs"])
    assert [one["source"] for one in told["servers"]] == ["measured", f"as {SERVER} (its kind)"]
    assert told["eta"]["tok_s"]["median"] == round(2 * best, 3)
    assert told["eta"]["finish"]["earliest"] is None  # one run has no spread
    ended = threading.Event()
    served = []

    def load():
        body = {"text": "The quick", "sampling_params": {"max_new_tokens": 200, "ignore_eos": True}}
        while not ended.is_set():
            served.append(
                requests.post(f"{fleet.url}/generate", json=body, timeout=60).json()["meta_info"]["completion_tokens"]
            )

    worker = threading.Thread(target=load)
    worker.start()
    try:
        live = fleet.run("eta", cmdline=f"--limit {SERVER}", live=True, seconds=6, **job)
    finally:
        ended.set()
        worker.join()
    assert live.rc == 0, live.stdout
    (server,) = live.tasks["Work out when the job is done"][SERVER]["servers"]
    assert server["source"] == "its own counters, as it runs now"
    assert server["tok_s"]["runs"] == 6
    assert 0 < server["tok_s"]["median"] < 200 * len(served)  # no more a second than in all of the time


def test_a_run_that_was_cut_is_gone_on_with(fleet, compared):
    """As after a controller that was killed in the middle: the end and one measurement were never written."""
    home = fleet.artifacts / "compare" / SERVER
    lost = [one for one in records(fleet, "measured") if one["profile"] == "narrow"] + records(fleet, "end")
    for path in home.glob("*.json"):
        if json.loads(path.read_text())["at"] in [one["at"] for one in lost]:
            path.unlink()
    kept = {path.name: path.read_bytes() for path in home.glob("*.json")}
    before = runs_now(fleet)
    target = stale_target(fleet)
    # Its lock too, whose holder is gone.
    lock = fleet.root / "run/sglang_cpu0.compare.lock.json"
    lock.write_text(json.dumps(holder(SERVER, alive=False)))
    again = compare(fleet)
    assert again.rc == 0, again.stdout
    assert not lock.exists()
    assert json.loads(target.read_text())[0]["labels"]["profile"] == "narrow"
    new = [one for one in records(fleet, "measured") if one["at"] > lost[-1]["at"]]
    # Narrow ran, and was started anew all the same: what is measured is a boot of its own.
    assert runs_now(fleet)[3] == new[0]["boot"]["launched_at"] > before[3]
    assert [(one["profile"], one["repeat"]) for one in new] == [("narrow", 1)]
    assert len({one["series"] for one in records(fleet, "measured")}) == 1
    assert runs_now(fleet)[:3] == before[:3]
    assert records(fleet, "begin")[-1]["before"]["of"] == records(fleet, "begin")[0]["at"]
    # Records are only ever added to, and a third run has nothing to do.
    assert {name: (home / name).read_bytes() for name in kept} == kept
    count = len(list(home.glob("*.json")))
    idle = compare(fleet)
    assert idle.rc == 0 and idle.changed(SERVER) == 0, idle.stdout
    assert len(list(home.glob("*.json"))) == count


def test_the_report_is_made_again_from_records(fleet, compared, tmp_path):
    made = fleet.run("report", out=str(tmp_path / "again.html"))
    assert made.rc == 0, made.stdout
    page = (tmp_path / "again.html").read_text()
    assert "narrow" in page and "broken did not start" in page and page.count("<svg") >= 4


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"profiles": ["wyde"]}, "profile 'wyde' is not known: known are wide, narrow, small, broken"),
        ({"sweep": "middle"}, "-e sweep is 'middle': expected short, long, both"),
        ({"prompts": "/no/such/file"}, "-e prompts: /no/such/file can't be read: No such file or directory"),
        ({"profile": "wide"}, "compare.yml was given -e profile: it takes several"),
    ],
)
def test_bad_input_is_one_sentence_and_touches_nothing(fleet, compared, options, said):
    before = runs_now(fleet)
    result = compare(fleet, **options)
    assert result.rc != 0
    assert said in re.sub(r"\s+", " ", result.stdout)
    assert runs_now(fleet) == before
