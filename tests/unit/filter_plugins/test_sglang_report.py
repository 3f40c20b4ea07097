# Copyright: sglang-fleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Tables that people read: the values are there, in 80 columns, and what is not known is a dash."""

from __future__ import annotations

import re

import pytest
from ansible.errors import AnsibleError
from sglang_report import capped, deploy_report, duration, status_report, table


def rows(text, first):
    """The table whose header begins with `first`, as {first cell: the other cells}."""
    lines = text.splitlines()
    start = next(index for index, line in enumerate(lines) if line.split()[:1] == [first.split()[0]] and first in line)
    cells = {}
    for line in lines[start + 2 :]:
        if not line.strip():
            break
        name, *rest = re.split(r"\s{2,}", line.strip())
        cells[name] = rest
    return cells


def ready(**more):
    return {
        "state": "ready",
        "pid": 4242,
        "timeline": [{"stage": "import", "at_s": 0.0}, {"stage": "ready", "at_s": 61.5}],
        "stage_seconds": {"import": 20.1, "weights": 41.4},
        "figures": {"kv_tokens": 241196, "slots_per_request": 5, "state_slots": 90},
        "cap": 18,
        **more,
    }


SPEC = {"url": "http://127.0.0.1:30000", "profile": "nomtp", "asked_running": 48}
RUN = {"concurrency": 8, "output_tok_s": 404.458, "ttft_ms": {"median": 51.26}, "tpot_ms": {"median": 9.0}}


def test_a_server_that_serves():
    text = deploy_report([{"name": "n-gpu0", "spec": SPEC, "outcome": ready()}])
    assert rows(text, "server")["n-gpu0"] == ["http://127.0.0.1:30000", "nomtp", "ready", "4242"]
    capacity = text.partition("What each can hold\n")[2]
    assert rows(capacity, "server")["n-gpu0"] == ["18", "48", "241196", "90", "-"]
    stages = text.partition("Seconds to ready, and in each stage\n")[2]
    assert rows(stages, "server")["n-gpu0"] == ["61.5", "20.1", "41.4"]
    assert "Benchmark" not in text
    assert text.splitlines()[-1] == "n-gpu0: asked for 48 running, got 18: state cache (90 slots, 5 a request)"


def test_a_server_that_failed_and_one_that_was_not_reached():
    failed = {"name": "n-gpu0", "spec": SPEC, "outcome": {"state": "failed", "msg": "n-gpu0 did not become ready: why"}}
    text = deploy_report([failed, {"name": "n-gpu1"}])
    told = rows(text, "server")
    assert told["n-gpu0"] == ["http://127.0.0.1:30000", "nomtp", "failed", "-"]
    assert told["n-gpu1"] == ["-", "-", "not reached", "-"]
    assert text.splitlines()[-1] == "n-gpu0 FAILED: n-gpu0 did not become ready: why"
    assert "Seconds to ready" not in text and "What each can hold" not in text


def test_a_benchmark_has_its_figures():
    benchmark = {"measured_at": "2026-01-01T00:00:00Z", "runs": [RUN, {**RUN, "concurrency": 16, "accept_length": 2.5}]}
    text = deploy_report([{"name": "n-gpu0", "spec": SPEC, "outcome": ready(), "benchmark": benchmark}])
    lines = [line.split() for line in text.partition("Benchmark (TTFT and TPOT: median, ms)\n")[2].splitlines()]
    assert lines[2:4] == [
        ["n-gpu0", "8", "404.5", "51.3", "9.0", "-", "01-01", "00:00Z"],
        ["n-gpu0", "16", "404.5", "51.3", "9.0", "2.5", "01-01", "00:00Z"],
    ]


def test_a_benchmark_that_failed_is_said():
    text = deploy_report([{"name": "n-gpu0", "spec": SPEC, "outcome": ready(), "benchmark_error": "no answer"}])
    assert "n-gpu0 serves, but its benchmark failed: no answer" in text.splitlines()


CAPPED = "n: asked for 48 running, got 4"


@pytest.mark.parametrize(
    ("asked", "got", "figures", "sentences"),
    [
        (48, 48, {}, []),
        (48, 64, {}, []),
        (None, 4, {}, []),
        (48, None, {}, []),
        (48, 4, {}, [CAPPED]),
        ("48", "4", {"slots_per_request": 5, "state_slots": 24}, [f"{CAPPED}: state cache (24 slots, 5 a request)"]),
    ],
)  # fmt: skip
def test_a_cap_below_what_was_asked_for_is_said_with_its_reason(asked, got, figures, sentences):
    assert capped("n", asked, got, figures) == sentences


def status(**more):
    return {
        "name": "n-gpu0", "state": "ready", "detail": None, "stage": "ready", "profile": "nomtp", "model": "m",
        "release": "0.5.17", "pid": 4242, "uptime_s": 7384, "running": 3, "waiting": 1, "token_usage": 0.256,
        "output_tok_s": 812.4, "cap": 18, "kv_tokens": 241196, "accept_length": None, "gpu_memory_gib": 84.0,
        "host_rss_gib": 3.1, "drift": [], **more,
    }  # fmt: skip


def test_the_state_of_a_fleet():
    unknown = dict.fromkeys(status())
    gone = {**unknown, "name": "n-gpu1", "state": "dead", "detail": "its process is gone", "drift": []}
    begun = status(name="n-gpu2", state="starting", stage="weights", drift=["cap: 1 -> 2"], running=None)
    text = status_report({"servers": [status(), gone, begun]})
    told = rows(text, "server")
    assert told["n-gpu0"] == ["ready", "nomtp", "0.5.17", "4242", "2h03m", "no"]
    assert told["n-gpu1"] == ["dead", *["-"] * 5]
    assert told["n-gpu2"][0] == "starting weights" and told["n-gpu2"][-1] == "yes"
    load = rows(text.split("\n\n")[1], "server")
    assert load["n-gpu0"] == ["3", "1", "18", "812.4", "-", "26 %", "84.0", "3.1"]
    assert load["n-gpu1"] == ["-"] * 8
    assert load["n-gpu2"][0] == "-"
    assert text.splitlines()[-2:] == ["n-gpu1: its process is gone", "n-gpu2: cap: 1 -> 2"]


TERMINAL, INDENTED = 80, 8
ALL_STAGES = ("import", "weights", "state pool", "KV pool", "graph capture", "host pools", "warm-up")


def test_tables_fit_a_terminal_as_ansible_prints_them():
    figures = {"kv_tokens": 1040851, "state_slots": 216, "slots_per_request": 5, "available_gib": 17.33}
    outcome = ready(pid=4194304, stage_seconds=dict.fromkeys(ALL_STAGES, 123.4), figures=figures)
    benchmark = {"measured_at": "2026-01-01T00:00:00Z", "runs": [{**RUN, "output_tok_s": 12345.6, "accept_length": 3.21}]}
    spec = {**SPEC, "profile": "mtp_hicache"}
    text = deploy_report([{"name": "node1-gpu0", "spec": spec, "outcome": outcome, "benchmark": benchmark}])
    told = [line for line in text.splitlines() if "asked for" not in line]
    busiest = status(name="node1-gpu0", profile="mtp_hicache", pid=4194304, state="starting", stage="graph capture")
    told += status_report({"servers": [busiest]}).splitlines()
    assert max(map(len, told)) <= TERMINAL - INDENTED


def test_no_server_is_an_empty_report():
    assert deploy_report([]) == ""
    assert "server" in status_report({"servers": []})


def test_numbers_stand_right_and_text_left():
    lines = table([["a", 1], ["bb", 10.5], ["c", None]], ["name", "n"]).splitlines()
    assert [line.index(word) for line, word in zip(lines[2:], ["a", "bb", "c"])] == [0, 0, 0]
    assert len({len(line) for line in lines[2:]}) == 1


@pytest.mark.parametrize("servers", [{}, "text", None])
def test_what_is_no_list_of_servers_is_refused(servers):
    with pytest.raises(AnsibleError, match="expected a list of servers, got"):
        deploy_report(servers)
    with pytest.raises(AnsibleError, match="expected a list of servers, got"):
        status_report({"servers": servers})


def test_a_row_of_another_length_is_refused():
    with pytest.raises(AnsibleError, match="a row of 1 cells under 2 headers"):
        table([["a"]], ["x", "y"])


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, None),
        (0, "0s"),
        (45.9, "45s"),
        (60, "1m00s"),
        (725, "12m05s"),
        (3600, "1h00m"),
        (11100, "3h05m"),
        (187200, "2d04h"),
    ],
)
def test_a_duration(seconds, text):
    assert duration(seconds) == text
