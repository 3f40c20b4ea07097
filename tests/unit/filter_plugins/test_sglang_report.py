# Copyright: sglang-fleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Tables that people read: the values are there, in 80 columns, and what is not known is a dash."""

from __future__ import annotations

import copy
import re

import pytest
from ansible.errors import AnsibleError
from sglang_plan import boot_record, fleet_plan, plan_request
from sglang_profile import resolve_profile
from sglang_report import (
    boots_report,
    capped,
    deploy_report,
    duration,
    history_report,
    plan_report,
    router_report,
    status_report,
    swap_report,
    table,
)


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


TOLD = {
    "state": "failed",
    "outcome": "failed",
    "stage": "state pool",
    "elapsed": 57.2,
    "cause_id": "no_state_memory",
    "cause": "the weights leave no memory",
    "advice": "raise it to 0.38",
    "lines": [f"line {number}" for number in range(9)],
    "log": "/r/logs/s/1.log",
    "bundle": "/r/bundles/s/1.tar.gz",
    "msg": "n-gpu0 did not become ready: all of it in a sentence",
}


def test_servers_that_failed_are_a_table_and_then_each_with_cause_advice_lines_and_places():
    early = {
        "state": "failed",
        "cause": "died",
        "cause_id": "unknown_flag",
        "stage": "import",
        "elapsed": 0.5,
        "advice": "take it out",
        "msg": "n-gpu1 ended at once with exit code 2: no such flag; whole log: /l",
        "log": "/l",
        "lines": [],
    }
    refused = {"state": "failed", "cause": "locked", "msg": "n-gpu2 is being worked on by bob"}
    servers = [{"name": f"n-gpu{number}", "spec": SPEC, "outcome": told} for number, told in enumerate([TOLD, early, refused])]
    text = deploy_report(servers)
    table = text.partition("Failed, in which stage and how long after the launch\n")[2].splitlines()
    assert [line.split() for line in table[2:5]] == [
        ["n-gpu0", "state", "57s", "no_state_memory"],
        ["n-gpu1", "import", "0s", "unknown_flag"],
        ["n-gpu2", "-", "-", "locked"],
    ]
    assert max(map(len, table[:5])) <= 72
    blocks = text.split("\n\n")[-3:]
    assert blocks[0].splitlines() == [
        "n-gpu0 FAILED: the weights leave no memory",
        "  do:     raise it to 0.38",
        *(f"  | line {number}" for number in range(3, 9)),
        "  log:    /r/logs/s/1.log",
        "  bundle: /r/bundles/s/1.tar.gz",
    ]
    assert blocks[1].splitlines()[:2] == [
        "n-gpu1 FAILED: n-gpu1 ended at once with exit code 2: no such flag; whole log: /l", "  do:     take it out",
    ]  # fmt: skip
    assert blocks[2] == "n-gpu2 FAILED: n-gpu2 is being worked on by bob"


def test_what_could_not_be_cleaned_up_is_said():
    text = deploy_report([{"name": "n-gpu0", "spec": SPEC, "outcome": {**TOLD, "left": "pid 7 outlives SIGKILL"}}])
    assert text.splitlines()[-1] == "  left:   pid 7 outlives SIGKILL"


def test_what_a_server_got_less_of_stands_under_one_heading():
    figures = {"state_slots": 24, "slots_per_request": 5, "context_len": 262144, "kv_tokens": 1741}
    outcome = {**ready(), "cap": 4, "figures": figures, "reductions": ["asked for 9 KV tokens, got 5: GPU memory"]}  # fmt: skip
    text = deploy_report([{"name": "n-gpu0", "spec": {**SPEC, "asked_running": 48}, "outcome": outcome}])
    assert text.partition("Less than was asked for\n")[2].splitlines() == [
        "n-gpu0: asked for 48 running, got 4: state cache (24 slots, 5 a request)",
        "n-gpu0: a request may have 262144 tokens, but 1741 fit: KV cache",
        "n-gpu0: asked for 9 KV tokens, got 5: GPU memory",
    ]


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


# -- plans and boots --------------------------------------------------------------------------------------------------
STATED = {"gpu_free_gib": 94.97, "host_free_gb": 900}
BOOTED = {
    "state": "ready", "outcome": "ready", "launched_at": "2026-11-29T16:30:56Z", "cap": 9, "stage_seconds": {}, "elapsed": 61.5,
    "figures": {"free_gpu_gib": 92.79, "kv_tokens": 263111, "state_slots": 48, "weights_gib": 51.05, "available_gib": 7.53},
}  # fmt: skip


@pytest.fixture
def servers(fleet_data):
    """Four servers of one node with a profile, as the role knows them."""

    def _servers(profile="mtp_hicache", **more):
        resolved = resolve_profile(fleet_data["sglang_profiles"], profile)
        spec = {"node": "node1", "args": {**resolved["args"], **resolved["hybrid_args"]}, "device": "cuda", "profile": profile}
        spec.update(model="qwen3.6-27b", model_path="/m", release="0.5.17")
        model = fleet_data["sglang_models"]["qwen3.6-27b"]
        known = {"found": {}, "declared": STATED, "model": model, "checked": {}, **more}
        return [{"spec": {**spec, "name": f"node1-gpu{gpu}", "gpus": [gpu]}, **copy.deepcopy(known)} for gpu in range(4)]

    return _servers


def fleet(servers, **wishes):
    return fleet_plan([plan_request(server) for server in servers], **wishes)


def paragraph(text, first):
    return next(part for part in text.split("\n\n") if part.startswith(first))


def unwrapped(text):
    """Text without the line breaks that a narrow terminal needs."""
    return " ".join(text.split())


def test_a_plan_of_four_servers(servers):
    text = plan_report(fleet(servers()))
    card = rows(paragraph(text, "On the card, GiB"), "server")
    assert list(card) == [f"node1-gpu{gpu}" for gpu in range(4)]
    assert card["node1-gpu3"] == ["92.79", "51.05", "5.53", "16.98", "7.03", "5.68", "6.48", "yes"]
    requests = rows(paragraph(text, "Requests"), "server")
    assert requests["node1-gpu0"] == ["9", "48", "261864", "48", "state slots"]
    assert rows(paragraph(text, "On the hosts, GB"), "node") == {"node1": ["621.12", "900.00", "-", "yes"]}
    assert "DOES NOT FIT" not in text


def test_tables_of_plans_and_boots_fit_a_terminal(servers):
    known = servers(declared={**STATED, "cgroup_limit_gb": 123.45})
    plan = fleet(known)
    records = [boot_record({**server, "ready": BOOTED}, plan["servers"][server["spec"]["name"]]) for server in known]
    tables = [part for part in plan_report(plan).split("\n\n") if "-----" in part]
    assert len(tables) == 3
    told = [line for part in [*tables, paragraph(boots_report(records), "Planned/observed")] for line in part.splitlines()]
    assert max(map(len, told)) <= TERMINAL - INDENTED


def test_notes_of_all_servers_are_told_once(servers):
    text = plan_report(fleet(servers()))
    assert text.split("\n\n")[-1].splitlines() == [
        "all: free: 94.97 free less 2.18 assumed for contexts; weights: from its",
        "  config; graphs and activations: unknown until a first boot of this",
        "  model, GPU, release and profile",
        "all: max-running-requests 15 with max-mamba-cache-size 75 runs 15",
        "  instead of 9 and leaves 142065 of 261864 KV tokens",
        "all: note: weights_gib is worked out from the config: 51.05 GiB at 16",
        "  bits each",
        "all: note: draft_weights_gib is worked out from the config: 5.53 GiB at",
        "  16 bits each",
    ]


def test_notes_of_some_servers_name_them(servers):
    known = servers()
    known[2]["checked"] = {"restarts": False}
    known[3]["declared"] = {**STATED, "gpu_free_gib": 90.0}
    lines = plan_report(fleet(known)).splitlines()
    assert "node1-gpu2: runs already: its host pools are in use and not summed" in lines
    assert [line[:45] for line in lines if ": free: " in line] == [
        "node1-gpu0, node1-gpu1, node1-gpu2: free: 94.",
        "node1-gpu3: free: 90.00 free less 2.18 assume",
    ]
    assert "all: " not in plan_report(fleet(known[:1])), "one server is called by its name"


def test_graphs_of_earlier_boots_are_told(servers):
    known = servers(declared={**STATED, "gpu": "H200"})
    kind = {"model": "qwen3.6-27b", "gpu": "H200", "release": "0.5.17", "profile": "mtp_hicache"}
    text = plan_report(fleet(known, records=[{**kind, "graphs_gib": 1.25}, {**kind, "graphs_gib": 1.75}]))
    assert "graphs and activations: 1.50 GiB of graphs in 2 earlier boot(s)" in unwrapped(text)


def test_what_does_not_fit_is_said_below_the_tables(servers):
    text = plan_report(fleet(servers(declared={**STATED, "host_free_gb": 350})))
    assert rows(paragraph(text, "On the hosts, GB"), "node")["node1"] == ["621.12", "350.00", "-", "NO"]
    assert unwrapped(paragraph(text, "DOES NOT FIT")) == (
        "DOES NOT FIT: node1: host pools 155.28 + 155.28 + 155.28 + 155.28 GB = 621.12 GB and 22.00 GB of the servers'"
        " processes do not fit into the node's available"
        " memory, 350.00 GB, of which 10.74 GB stay free: hicache-size 76 on each of its 4 servers fits"
    )
    text = plan_report(fleet(servers(declared={**STATED, "gpu_free_gib": 40})))
    assert rows(paragraph(text, "On the card"), "server")["node1-gpu0"][-1] == "NO"


def test_a_suggestion_that_is_possible(servers):
    (server, *_others) = servers("mtp")
    text = plan_report(fleet([server], want_running=16))
    assert paragraph(text, "node1-gpu0: 16 running").splitlines() == [
        "node1-gpu0: 16 running, 158508 KV tokens, 6.91 GiB left with",
        "    max-running-requests: 16",
        "    mamba-radix-cache-strategy: extra_buffer_lazy",
        "    max-mamba-cache-size: 64",
        "    more: 18 running fit, 148289 KV tokens, with max-running-requests",
        "      18, mem-fraction-static 0.938, mamba-radix-cache-strategy",
        "      extra_buffer_lazy, max-mamba-cache-size 72",
    ]
    lossy = plan_report(fleet([server], want_running=24, want_context=16384, allow_lossy=True))
    assert unwrapped(paragraph(lossy, "node1-gpu0: 24 running")).endswith(
        " lossy: mamba-ssm-dtype bfloat16: the state cache in bfloat16 costs accuracy"
        " lossy: kv-cache-dtype fp8_e4m3: the KV cache in fp8 costs accuracy"
    )


def test_a_suggestion_that_is_not_possible_tells_the_nearest(servers):
    (server, *_others) = servers("mtp")
    text = plan_report(fleet([server], want_running=16, want_context=16384))
    suggestion = fleet([server], want_running=16, want_context=16384)["servers"]["node1-gpu0"]["suggestion"]
    plan = suggestion["nearest"]["plan"]
    assert 13 < plan["max_running_requests"] < 16 and plan["kv_tokens"] >= plan["max_running_requests"] * 16384
    told = paragraph(text, "node1-gpu0: not on this card").splitlines()
    flags = [f"    {name}: {value}" for name, value in suggestion["nearest"]["args"].items()]
    assert told[-len(flags) :] == flags
    assert unwrapped(" ".join(told[: -len(flags)])) == (
        "node1-gpu0: not on this card: 16 requests x 16384 tokens want 262144 KV tokens; 216701 fit beside"
        " the rest with mem-fraction-static 0.983;"
        f" allow_lossy lets a narrower type of state or KV cache be tried nearest: {plan['max_running_requests']} running,"
        f" {plan['kv_tokens']} KV tokens, {plan['left_gib']:.2f} GiB left with"
    )


def test_what_is_the_same_for_all_servers_is_suggested_once(servers):
    text = plan_report(fleet(servers(declared={**STATED, "host_free_gb": 350}), want_running=8, want_context=4096))
    (told,) = [part for part in text.split("\n\n") if " running, " in part]
    assert told.startswith("all: 9 running, ") and told.splitlines()[-1] == "    hicache-size: 76"
    assert "GB on the host with" in unwrapped(told)


def test_servers_that_cannot_be_planned_stand_below_the_others(servers):
    known = servers()
    known[1]["model"] = {**known[1]["model"], "config": {"architectures": ["NewForCausalLM"]}}
    for server in known[2:]:
        server.update(found={"unreachable": True, "msg": "no route"}, declared={})
    text = plan_report(fleet(known, tolerant=True))
    assert list(rows(paragraph(text, "On the card, GiB"), "server")) == ["node1-gpu0"]
    assert [unwrapped(part) for part in text.split("\n\n") if part.startswith("NOT PLANNED")] == [
        "NOT PLANNED: node1-gpu1: model class NewForCausalLM is not one whose memory is known here; plan it by a boot",
        "NOT PLANNED: node1-gpu2, node1-gpu3: node1 could not be reached: state its memory in the inventory as"
        " sglang_node_memory: {gpu_free_gib: …, host_free_gb: …}",
    ]
    for server in known:
        server.update(found={"unreachable": True, "msg": "no route"}, declared={})
    assert plan_report(fleet(known, tolerant=True)).startswith("NOT PLANNED: all: node1 could not be reached: ")


def test_everything_told_of_a_plan_fits_a_terminal(servers):
    known = servers(declared={**STATED, "host_free_gb": 350})
    known[1]["declared"] = {"gpu_free_gib": 58.0}
    known[2]["model"] = {**known[2]["model"], "config": {"architectures": ["NewForCausalLM"]}}
    text = plan_report(fleet(known, tolerant=True, want_running=24, want_context=16384, allow_lossy=True))
    assert max(map(len, text.splitlines())) <= TERMINAL - INDENTED


def test_where_not_even_one_request_runs_there_is_no_nearest(servers):
    (server, *_others) = servers("mtp", declared={**STATED, "gpu_free_gib": 40})
    text = plan_report(fleet([server], want_running=2))
    line = unwrapped(paragraph(text, "node1-gpu0: not on this card"))
    assert "nearest" not in text and "weights of 56.62 GiB, with " in line


def test_flags_that_give_what_is_wanted_as_they_are(servers):
    (server, *_others) = servers("nomtp")
    server["spec"]["args"] = {**server["spec"]["args"], "max-running-requests": 18}
    told = paragraph(plan_report(fleet([server], want_running=18)), "node1-gpu0: 18 running").splitlines()
    assert unwrapped(" ".join(told)).endswith(" GiB left with the flags as they are")


def test_a_plan_of_nothing():
    assert plan_report(fleet_plan([])) == "Nothing to plan: no selected server is for cuda."


def boot(name="node1-gpu0", **compared):
    return {
        "server": name,
        "compared": [
            {"figure": figure, "planned": planned, "observed": observed, "off": off, "rounding": False, "warn": warn}
            for figure, (planned, observed, off, warn) in compared.items()
        ],
    }


def test_planned_and_observed_stand_side_by_side():
    text = boots_report(
        [
            boot(
                kv_tokens=(367751, 365151, 0.0071, False), mamba_slots=(24, 24, 0.0, False), kv_gib=(22.4, 22.3, 0.0045, False)
            ),
            boot("node1-gpu1", kv_tokens=(300000, 365151, -0.1784, True), max_running_requests=(4, 4, 0.0, False)),
        ]
    )
    table_, note = text.split("\n\n")
    assert rows(table_, "server") == {
        "node1-gpu0": ["367751/365151", "24/24", "-", "kv_tokens +0.7 %"],
        "node1-gpu1": ["300000/365151", "-", "4/4", "kv_tokens -17.8 %"],
    }
    assert note == "node1-gpu1: kv_tokens planned 300000, observed 365151 (-17.8 %)"


def test_boots_without_a_plan_are_not_told():
    assert boots_report([]) == boots_report([boot()]) == ""
    assert "gpu1" not in boots_report([boot(kv_tokens=(1, 1, 0.0, False)), boot("node1-gpu1")])


@pytest.mark.parametrize("plan", [[], "text", None])
def test_what_is_no_plan_is_refused(plan):
    with pytest.raises(AnsibleError, match="expected the plan of a fleet, got"):
        plan_report(plan)


@pytest.mark.parametrize("servers", [{}, "text", None])
def test_what_is_no_list_of_servers_is_refused(servers):
    with pytest.raises(AnsibleError, match="expected a list of servers, got"):
        deploy_report(servers)
    with pytest.raises(AnsibleError, match="expected a list of servers, got"):
        status_report({"servers": servers})
    with pytest.raises(AnsibleError, match="expected a list of servers, got"):
        boots_report(servers)


def test_a_row_of_another_length_is_refused():
    with pytest.raises(AnsibleError, match="a row of 1 cells under 2 headers"):
        table([["a"]], ["x", "y"])


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, None),
        (0, "0s"),
        (45.4, "45s"),
        (45.9, "46s"),
        (59.6, "1m00s"),
        (60, "1m00s"),
        (725, "12m05s"),
        (3600, "1h00m"),
        (11100, "3h05m"),
        (187200, "2d04h"),
    ],
)
def test_a_duration(seconds, text):
    assert duration(seconds) == text


ROUTER = {
    "node": "n", "url": "http://127.0.0.1:30080", "state": "ready", "detail": None, "pid": 7, "uptime_s": 61,
    "workers": [
        {"name": "n-gpu0", "url": "http://127.0.0.1:30000", "state": "ready", "load": 2},
        {"name": "n-gpu1", "url": "http://127.0.0.1:30001", "state": "absent", "load": None},
        {"name": None, "url": "http://10.0.0.9:1", "state": "failed", "load": 0},
    ],
}  # fmt: skip


def test_a_router_and_what_it_routes_to():
    text = router_report(ROUTER)
    assert text.splitlines()[0] == "Router http://127.0.0.1:30080 on n: ready (pid 7, up 1m01s)"
    assert rows(text, "server") == {
        "n-gpu0": ["http://127.0.0.1:30000", "ready", "2"],
        "n-gpu1": ["http://127.0.0.1:30001", "absent", "-"],
        "not of this fleet": ["http://10.0.0.9:1", "failed", "0"],
    }
    assert max(map(len, text.splitlines())) <= 72
    assert text in status_report({"servers": [], "router": ROUTER})


def test_a_router_that_does_not_run():
    gone = {**ROUTER, "state": "dead", "detail": "the node was restarted", "pid": None, "uptime_s": None, "workers": []}
    assert router_report(gone) == "Router http://127.0.0.1:30080 on n: dead: the node was restarted"
    with pytest.raises(AnsibleError):
        router_report(None)


def swapped(name, outcome, release="0.5.17", **result):
    now = {"state": "ready", "profile": "mtp", "release": release, "model": "q", "detail": None}
    return {"name": name, "result": {"outcome": outcome, **result}, "now": now}


def test_a_swap_tells_of_each_server_what_it_runs_and_of_the_others_why():
    gone = {
        "name": "n-gpu2",
        "result": {"outcome": "not begun"},
        "now": dict.fromkeys(("state", "profile", "release", "model")),
    }
    gate = {"sentence": "90 after 100", "verdict": "worse"}
    text = swap_report(
        [
            swapped("n-gpu0", "swapped", seconds={"drain": 0.3, "out": 21.5}),
            swapped("n-gpu1", "reverted", why="too slow", bundle="/b.tar.gz", gate=gate),
            gone,
        ]
    )
    cells = rows(text, "server")
    assert cells["n-gpu0"] == ["swapped", "mtp", "ready", "0.3", "21.5"]
    assert cells["n-gpu1"] == ["reverted", "mtp", "ready", "-", "-"]
    assert cells["n-gpu2"] == ["not begun", "-", "unreachable", "-", "-"]
    assert text.endswith("n-gpu1 REVERTED: too slow\n  bundle: /b.tar.gz\nn-gpu1: 90 after 100, worse")
    long = swap_report([swapped("n-gpu1", "reverted", why="a reason of many words " * 12)])
    assert max(map(len, long.splitlines())) <= 72
    two = swap_report([swapped("n-gpu0", "swapped"), swapped("n-gpu1", "not begun", release="0.5.16")])
    assert rows(two, "server")["n-gpu1"] == ["not begun", "mtp", "0.5.16", "ready", "-", "-"]


def test_history_tells_one_change_once_and_names_what_changed_with_the_profile():
    was, now = ({"profile": name, "release": release, "model": "q", "port": 1} for name, release in (("a", "1"), ("b", "2")))
    entry = {"at": "2026-01-02T03:04:05Z", "server": "n-gpu0", "what": "swapped", "who": "eve", "run": "r1"}
    started = {**entry, "at": "2026-01-01T00:00:00Z", "what": "started", "run": "r0", "before": None, "after": "a"}
    text = history_report(
        [
            {**entry, "before": was, "after": now, "why": ""},
            {**entry, "at": "2026-01-02T09:09:09Z", "before": "a", "after": "b"},
            started,
        ]
    )
    assert text.splitlines()[2:] == [
        "2026-01-01 00:00:00Z  n-gpu0  eve  started  a",
        "2026-01-02 03:04:05Z  n-gpu0  eve  swapped  a -> b, release 1 -> 2",
    ]
    assert "reason" in history_report([{**entry, "what": "lost", "before": was, "after": now, "why": "a reason"}])
    flags = {**entry, "before": was, "after": {**was, "port": 2}, "changes": ["max-running-requests: 8 -> 48", "port: 1 -> 2"]}
    assert "Z n-gpu0: max-running-requests: 8 -> 48; port: 1 -> 2" in history_report([flags])
    assert "max-running" not in history_report([{**flags, "after": now}]), "the name tells"
    assert history_report([]) == "Nothing is known of any change of the selected servers."
    assert "2026-01-01" not in history_report([started, {**entry, "before": was, "after": now}], limit=1)
