# Copyright: sglang-fleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The action sglang_compare: turns, records that are only ever added, what a cut run left, and refusals in one sentence."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace

import pytest
from ansible.errors import AnsibleActionFail
from helpers.compare import WORKLOAD, record, run

SHAPES = {"short": {"input_tokens": 128, "output_tokens": 256}, "long": {"input_tokens": 4096, "output_tokens": 512}}
ASKED = {
    "do": "workloads", "sweep": "short", "shapes": SHAPES, "concurrencies": [1, 4], "repeats": 3, "profiles": ["nomtp", "mtp"],
    "known": ["nomtp", "mtp", "mtp_hicache"], "prompts_per_concurrency": 4, "min_prompts": 8, "prompts": "", "called_from": ".",
}  # fmt: skip
LAUNCHES = {"nomtp": "nomtp-launch", "mtp": "mtp-launch"}


@pytest.fixture
def act(load, monkeypatch):
    plugin = load("action_plugins", "sglang_compare")
    warned = []
    monkeypatch.setattr(plugin.ActionBase, "run", lambda self, tmp=None, task_vars=None: {})
    monkeypatch.setattr(plugin, "display", SimpleNamespace(warning=warned.append))

    def _act(**args):
        action = plugin.ActionModule.__new__(plugin.ActionModule)
        action._task = SimpleNamespace(args=args)
        return action.run(None, {})

    _act.warned = warned
    return _act


@pytest.fixture
def keep(act, tmp_path):
    """Keep records with times of their own, as compare.yml would have."""
    times = iter(range(10, 60))

    def _keep(kind="measured", **more):
        at = f"2026-11-29T10:{next(times)}:00.000Z"
        head = {"server": "node1-gpu0", "series": "2026-11-29T10:00:00.000Z", "gpus": [], **more}
        base = record(**more) if kind == "measured" else head
        return act(do="keep", folder=str(tmp_path), record={**base, "kind": kind, "at": at})["record"]

    return _keep


@pytest.fixture
def todo(act, tmp_path):
    def _todo(**more):
        asked = {
            "server": "node1-gpu0", "launches": LAUNCHES, "workloads": [WORKLOAD], "concurrencies": [1, 4], "repeats": 2,
            "release": "0.5.17", "model": "qwen3.6-27b", "gpus": ["NVIDIA H200"], "runs_now": {"pid": None, "running": None},
        }  # fmt: skip
        return act(do="todo", folder=str(tmp_path), **{**asked, **more})

    return _todo


# What is sent


def test_a_workload_has_the_same_id_for_the_same_load(act):
    one, two = act(**ASKED), act(**{**ASKED, "profiles": ["mtp"], "concurrencies": [48], "repeats": 1})
    assert one["workloads"] == two["workloads"]
    (short,) = one["workloads"]
    assert (short["name"], short["source"], short["input_tokens"], short["output_tokens"]) == ("short", "random", 128, 256)
    longer = {**SHAPES, "short": {"input_tokens": 129, "output_tokens": 256}}
    assert act(**{**ASKED, "shapes": longer})["workloads"][0]["id"] != short["id"]
    assert act(**{**ASKED, "min_prompts": 9})["workloads"][0]["id"] != short["id"]


def test_concurrencies_come_as_a_list_a_number_or_text(act):
    told = [act(**{**ASKED, "concurrencies": given})["concurrencies"] for given in ([1, 4], 4, "4", "1, 4")]
    assert told == [[1, 4], [4], [4], [1, 4]]


def test_one_profile_is_measured_with_a_word(act):
    act(**{**ASKED, "profiles": ["mtp"]})
    assert act.warned == ["-e profiles names mtp alone: it is measured, and compared to nothing"]


def test_a_sweep_of_both(act):
    both = act(**{**ASKED, "sweep": "both"})["workloads"]
    assert [one["name"] for one in both] == ["short", "long"]
    assert len({one["id"] for one in both}) == 2


def test_prompts_are_read_and_told_apart_by_their_content(act, tmp_path):
    path = tmp_path / "job.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"question {n}"}) + "\n" for n in range(16)))
    asked = {**ASKED, "prompts": "job.jsonl", "called_from": str(tmp_path)}
    answer = act(**asked)
    (workload,) = answer["workloads"]
    assert answer["prompts"] == str(path)
    assert (workload["source"], workload["prompts"], workload["input_tokens"]) == ("prompts", 16, None)
    path.write_text(path.read_text().replace("question 3", "question three"))
    assert act(**asked)["workloads"][0]["id"] != workload["id"]
    # Shapes that differ in nothing but the input are one workload then.
    same = {"short": {"input_tokens": 1, "output_tokens": 9}, "long": {"input_tokens": 2, "output_tokens": 9}}
    assert len(act(**{**asked, "sweep": "both", "shapes": same})["workloads"]) == 1


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"profiles": []}, "compare.yml needs profiles to compare"),
        ({"profiles": ["mpt"]}, "profile 'mpt' is not known: known are nomtp, mtp, mtp_hicache"),
        ({"profiles": ["mtp", "mtp"]}, "-e profiles names mtp twice"),
        ({"sweep": "all"}, "-e sweep is 'all': expected short, long, both"),
        ({"concurrencies": [1, 0]}, "-e concurrencies has 0: expected whole numbers above 0"),
        ({"concurrencies": ["4"]}, "-e concurrencies has '4'"),
        ({"concurrencies": []}, "-e concurrencies has []"),
        ({"concurrencies": "1,two"}, "-e concurrencies has 'two': expected whole numbers above 0"),
        ({"concurrencies": "1,1"}, "-e concurrencies names 1 twice: name each concurrency once; -e repeats measures it again"),
        ({"concurrencies": [1, 4, 4]}, "-e concurrencies names 4 twice"),
        ({"concurrencies": True}, "-e concurrencies has True"),
        ({"concurrencies": {}}, "-e concurrencies has {}"),
        ({"repeats": 0}, "-e repeats has 0"),
        ({"shapes": {"short": {"input_tokens": 1}}}, "expected input_tokens and output_tokens"),
        ({"shapes": {}}, "sglang_compare_shapes has None for short"),
        ({"prompts": "none.jsonl"}, "none.jsonl can't be read: No such file"),
    ],
)
def test_what_cannot_be_measured_is_refused(act, tmp_path, change, said):
    with pytest.raises(AnsibleActionFail) as caught:
        act(**{**ASKED, "called_from": str(tmp_path), **change})
    assert said in caught.value.message


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b'{"prompt": "a"}\nnot json\n', "line 2 is no JSON: expected a JSON mapping a line"),
        (b'{"prompt": "a"}\n{"text": "b", "messages": []}\n', "line 2 has text and messages: which of them is to be sent?"),
        (b'{"prompt": "a"}\n["b"]\n', "line 2 has no prompt, text, messages or conversations to send"),
        (b"\n\n", "it holds no line"),
        (b'{"prompt": "\xff"}', "is not UTF-8"),
        (b'{"prompt": "one"}\n' * 15, "has 15 prompts and the largest concurrency sends 16"),
    ],
)
def test_bad_prompts_are_refused_by_what_is_bad(act, tmp_path, content, said):
    (tmp_path / "job.jsonl").write_bytes(content)
    with pytest.raises(AnsibleActionFail) as caught:
        act(**{**ASKED, "prompts": str(tmp_path / "job.jsonl")})
    assert said in caught.value.message


def test_an_unknown_step_is_refused(act):
    with pytest.raises(AnsibleActionFail, match="do is 'measure': expected workloads, todo, keep, report"):
        act(do="measure")


# Turns


def test_repeats_go_in_turn(todo):
    turns = todo()["turns"]
    assert [(turn["profile"], turn["repeat"]) for turn in turns] == [("nomtp", 1), ("mtp", 1), ("nomtp", 2), ("mtp", 2)]
    assert all(turn["todo"] == [{"workload": WORKLOAD, "concurrencies": [1, 4]}] for turn in turns)


def test_what_is_measured_is_not_measured_again(todo, keep):
    keep(runs=[run(1, 10.0), run(4, 20.0)])
    keep(profile="mtp", runs=[run(1, 10.0), run(4, 1.0, failed=2)], outcome="failed", error="two failed")
    keep(runs=[run(1, 10.0)], repeat=2)
    answer = todo()
    assert [(turn["profile"], turn["repeat"], turn["todo"][0]["concurrencies"]) for turn in answer["turns"]] == [
        ("mtp", 1, [4]),
        ("nomtp", 2, [4]),
        ("mtp", 2, [1, 4]),
    ]
    assert (answer["series"], answer["measured_already"]) == ("2026-11-29T10:00:00.000Z", 4)
    alone = todo(repeats=1, launches={"nomtp": "nomtp-launch"}, concurrencies=[4])
    assert (alone["turns"], alone["measured_already"]) == ([], 1), "cells of others and other cells are not asked for"


@pytest.mark.parametrize(
    "change",
    [
        {"fresh": True}, {"release": "0.5.23"}, {"model": "another"}, {"gpus": ["NVIDIA L4"]}, {"server": "node1-gpu1"},
        {"launches": {"nomtp": "other flags"}}, {"workloads": [{**WORKLOAD, "id": "ffff"}]},
    ],
)  # fmt: skip
def test_what_is_unlike_is_measured(todo, keep, change):
    keep(runs=[run(1, 10.0), run(4, 20.0)])
    assert todo(launches={"nomtp": "nomtp-launch"}, repeats=1)["turns"] == []
    assert len(todo(**{"launches": {"nomtp": "nomtp-launch"}, "repeats": 1, **change})["turns"]) == 1


def test_only_the_newest_series_is_gone_on_with(todo, keep):
    keep(runs=[run(1, 10.0), run(4, 20.0)])
    keep(runs=[run(1, 10.0)], series="2026-12-01T00:00:00.000Z")
    answer = todo(launches={"nomtp": "nomtp-launch"}, repeats=1)
    assert answer["series"] == "2026-12-01T00:00:00.000Z"
    assert answer["turns"][0]["todo"][0]["concurrencies"] == [4]


def test_a_series_that_was_cut_before_it_had_anything_is_gone_on_with(todo, keep):
    keep(runs=[run(1, 10.0), run(4, 20.0)])
    begun = {"series": "2026-12-01T00:00:00.000Z", "gpus": ["NVIDIA H200"], "workloads": [WORKLOAD], "launches": LAUNCHES}
    keep("begin", before=STOPPED, model="another", release="0.5.17", **begun)
    keep("end", put_back=True, gpus=["NVIDIA H200"])
    assert todo()["series"] == "2026-11-29T10:00:00.000Z"
    keep("begin", before=STOPPED, model="qwen3.6-27b", release="0.5.17", **begun)
    answer = todo(repeats=1)
    assert (answer["series"], len(answer["turns"])) == ("2026-12-01T00:00:00.000Z", 2)


def test_a_busy_server_is_warned_of(todo, act):
    todo(runs_now={"pid": 1, "running": 3, "started_with": {"launch_sha256": "x"}})
    assert act.warned == [
        "node1-gpu0 has 3 requests running: it is stopped all the same, and they get the stop's time to finish"
    ]


# What is put back


def running(profile, launch):
    return {"pid": 7, "profile": profile, "running": 0, "started_with": {"launch_sha256": launch}}


STOPPED = {"pid": None, "profile": None, "running": None, "started_with": None}


def test_what_runs_now_is_put_back(todo):
    assert todo(runs_now=running("old", "old-launch"))["before"] == {"of": None, **running("old", "old-launch")}
    assert todo(runs_now=STOPPED)["before"]["pid"] is None


@pytest.mark.parametrize("now", [STOPPED, running("mtp", "mtp-launch"), running("nomtp", "nomtp-launch")])
def test_after_a_cut_run_it_is_what_ran_before_that(todo, keep, now):
    begun = keep("begin", before={"of": None, **running("old", "old-launch")}, launches=LAUNCHES)
    keep("end", put_back=False, error="no memory")
    assert todo(runs_now=now)["before"] == {**running("old", "old-launch"), "of": begun["at"]}
    # Cut once more: what ran before the first of them.
    again = keep("begin", before={"of": begun["at"], **running("old", "old-launch")}, launches=LAUNCHES)
    assert todo(runs_now=now)["before"] == {**running("old", "old-launch"), "of": again["at"]}
    keep("end", put_back=True, error=None)
    assert todo(runs_now=now)["before"] == {"of": None, **now}


def test_what_was_deployed_since_stays(todo, keep):
    keep("begin", before=running("old", "old-launch"), launches=LAUNCHES)
    since = running("newer", "newer-launch")
    assert todo(runs_now=since)["before"] == {"of": None, **since}


# Records


def test_a_record_is_strict_json_and_never_written_twice(act, tmp_path):
    kept = {"kind": "end", "server": "n", "at": "2026-11-29T10:00:00.000Z", "figure": float("nan")}
    answer = act(do="keep", folder=str(tmp_path), record=kept)
    path = tmp_path / "compare/n/20261129T100000.000Z.json"
    assert answer["path"] == str(path)
    assert json.loads(path.read_text(), parse_constant=pytest.fail) == {"schema": 1, **kept, "figure": None}
    with pytest.raises(AnsibleActionFail, match="can't be kept"):
        act(do="keep", folder=str(tmp_path), record={**kept, "figure": 1})
    assert json.loads(path.read_text())["figure"] is None


def test_a_folder_that_cannot_be_written_is_one_sentence(act, tmp_path):
    (tmp_path / "compare").write_text("a file")
    with pytest.raises(AnsibleActionFail, match="the record of n can't be kept: .*: Not a directory"):
        act(do="keep", folder=str(tmp_path), record={"kind": "end", "server": "n"})


def test_what_is_no_record_is_warned_of_and_left_out(todo, keep, act, tmp_path):
    keep(runs=[run(1, 10.0), run(4, 20.0)])
    home = tmp_path / "compare/node1-gpu0"
    (home / "20270101T000000.000Z.json").write_text("{cut")
    (home / "20270102T000000.000Z.json").write_text('{"schema": 2}')
    assert todo(launches={"nomtp": "nomtp-launch"}, repeats=1)["turns"] == []
    assert ["is no record" in warning or "another version" in warning for warning in act.warned] == [True, True]


# The report


def test_a_report_is_text_and_a_page(act, keep, tmp_path):
    keep(runs=[run(1, 10.0)])
    keep(profile="mtp", runs=[run(1, 20.0)])
    out = tmp_path / "deep" / "report.html"
    answer = act(do="report", folders=[str(tmp_path), str(tmp_path)], servers=["node1-gpu0"], out=str(out), required=True)
    assert answer["page"] == str(out) and out.read_text().startswith("<!DOCTYPE html>")
    assert "mtp* wins at every concurrency measured (1)" in answer["text"]
    assert answer["comparisons"][0]["profiles"][0]["cells"][0]["runs"] == 1


def test_without_matplotlib_the_text_stays_and_the_page_says_how(act, keep, tmp_path, monkeypatch):
    keep(runs=[run(1, 10.0)])
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    asked = {"do": "report", "folders": [str(tmp_path)], "servers": ["node1-gpu0"], "out": str(tmp_path / "r.html")}
    answer = act(**asked)
    assert answer["page"] is None and "10.0" in answer["text"]
    assert "pip install -r requirements-report.txt" in act.warned[0]
    with pytest.raises(AnsibleActionFail, match="pip install -r requirements-report.txt"):
        act(**asked, required=True)


def test_a_report_has_the_profiles_that_are_asked_for(act, keep, tmp_path):
    keep(runs=[run(1, 10.0)])
    keep(profile="mtp", runs=[run(1, 20.0)])
    asked = {"do": "report", "folders": [str(tmp_path)], "servers": ["node1-gpu0"], "out": str(tmp_path / "r.html")}
    answer = act(**asked, profiles=["nomtp"], required=True)
    assert [profile["name"] for profile in answer["comparisons"][0]["profiles"]] == ["nomtp"]
    assert "mtp*" not in answer["text"]
    assert len(act(**asked, profiles=[])["comparisons"][0]["profiles"]) == 2
    with pytest.raises(AnsibleActionFail, match="nothing was measured yet of other on node1-gpu0"):
        act(**asked, profiles=["other"], required=True)


def test_nothing_measured_is_refused_where_a_report_is_wanted(act, tmp_path):
    asked = {"do": "report", "folders": [str(tmp_path)], "servers": ["n"], "out": str(tmp_path / "r.html")}
    assert act(**asked)["page"] is None
    with pytest.raises(AnsibleActionFail, match="nothing was measured yet on n: compare.yml"):
        act(**asked, required=True)
