# Copyright: sglang-fleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""When a job is done: tokens an hour are not tokens a day, and an interval comes from runs that were repeated."""

from __future__ import annotations

import datetime
import math

import pytest
from ansible.errors import AnsibleError, AnsibleFilterError, AnsibleTypeError
from helpers.compare import WORKLOAD, curve, record, run
from hypothesis import given
from hypothesis import strategies as st
from sglang_eta import duration, eta, number, report, speeds, told

NOW = "2026-11-29T18:00:00+01:00"
SPEEDS = st.floats(min_value=0.5, max_value=1e5, allow_nan=False)


def server(name="n-gpu0", tok_s=None, gpus=1, **more):
    figure = None if tok_s is None else {"median": tok_s, "min": tok_s * 0.9, "max": tok_s * 1.1, "runs": 3}
    return {"name": name, "gpus": gpus, "tok_s": figure, **more}


def test_the_job_that_was_dated_wrongly_once():
    """1,500 tok/s for 902,087 generations of 2,500 tokens."""
    result = eta([server()], 902087, 2500, NOW, tok_s=1500)
    assert result["tokens_an_hour"] == 5_400_000
    assert result["tokens_a_day"] == 129_600_000
    assert result["tokens_left"] == 2_255_217_500
    assert round(result["hours"]["median"] / 24, 1) == 17.4
    assert result["finish"]["at"] == "2026-12-17T03:37+01:00"
    text = report(result)
    assert "1,500 tok/s = 5,400,000 tokens an hour, 129,600,000 a day" in text
    assert "417.6 h (17.4 days)" in text and "Thu 2026-12-17 03:37 +01:00" in text
    assert "a speed that is given has no spread" in text


def test_what_is_done_is_not_done_again():
    whole, rest = (eta([server()], 1000, 10, NOW, tok_s=1, done=done) for done in (0, 250))
    assert rest["tokens_left"] == 7500
    assert rest["hours"]["median"] == round(0.75 * whole["hours"]["median"], 2)
    assert eta([server()], 1000, 10, NOW, tok_s=1, done=1000)["finish"]["at"] == "2026-11-29T18:00+01:00"


def test_the_interval_is_the_range_of_the_runs():
    result = eta([server("a", 50.0), server("b", 50.0)], 36, 1000, NOW)
    assert result["tok_s"] == {"median": 100.0, "min": 90.0, "max": 110.0, "runs": 3}
    assert result["hours"] == {"median": 0.1, "least": 0.09, "most": 0.11}
    finish = eta([server("a", 50.0), server("b", 50.0)], 36000, 1000, NOW)["finish"]
    assert finish["earliest"] < finish["at"] < finish["latest"]
    single = server("b", 50.0)
    single["tok_s"]["runs"] = 1
    result = eta([server("a", 50.0), single], 36, 1000, NOW)
    assert (result["hours"]["least"], result["finish"]["latest"]) == (None, None)
    assert "between: not known, one run has no spread" in report(result)


def test_a_slice_without_a_token_gives_no_latest_finish():
    stalled = server("a", 50.0)
    stalled["tok_s"]["min"] = 0.0
    assert eta([stalled], 36, 1000, NOW)["finish"]["latest"] is None


def test_servers_that_hold_it_back_and_one_more_gpu():
    servers = [server("a", 100.0), server("b", 100.0), server("c", 40.0), server("d")]
    result = eta(servers, 86400, 240, NOW)
    assert result["hours"]["median"] == 24.0
    assert result["held_back_by"] == [{"name": "c", "tok_s": 40.0, "usual_tok_s": 100.0, "costs_hours": 4.8}]
    assert result["unknown"] == ["d"]
    assert result["one_more_gpu"] == {"tok_s": 80.0, "saves_hours": 6.0, "at": "2026-11-30T12:00+01:00"}
    assert result["even_split"] == {"hours": 48.0, "last": "c"}
    text = report(result)
    assert "held back by c: 40.0 tok/s where 100 is usual, costs 4.8 h" in text
    assert "not counted: d: its speed is not known" in text
    told_why = report(result, [server("d", profile="p", concurrency=None, source="connection refused")])
    assert "not counted: d: connection refused" in told_why
    assert "with equal shares instead of a queue: 48.0 h (2.0 days), c is last" in text


def test_two_gpus_are_compared_by_the_gpu():
    result = eta([server("a", 100.0), server("b", 190.0, gpus=2)], 10, 10, NOW)
    assert result["held_back_by"] == []
    assert result["one_more_gpu"]["tok_s"] == round(290 / 3, 1)


@given(st.lists(SPEEDS, min_size=1, max_size=8), st.integers(1, 10**6), st.integers(1, 10**5), st.integers(0, 10**6))
def test_more_servers_finish_sooner_and_the_interval_holds_the_finish(fleet, samples, output_tokens, done):
    done = min(done, samples)
    servers = [server(str(number), speed) for number, speed in enumerate(fleet)]
    result = eta(servers, samples, output_tokens, NOW, done=done)
    exact = (samples - done) * output_tokens / sum(fleet) / 3600
    assert math.isclose(result["hours"]["median"], exact, rel_tol=1e-3, abs_tol=0.01)
    assert result["hours"]["least"] <= result["hours"]["median"] <= result["hours"]["most"]
    more = eta([*servers, server("one more", fleet[0])], samples, output_tokens, NOW, done=done)
    assert more["hours"]["median"] <= result["hours"]["median"]
    assert 0 <= result["one_more_gpu"]["saves_hours"] <= result["hours"]["median"] + 0.01
    assert datetime.datetime.fromisoformat(result["finish"]["at"]).utcoffset() == datetime.timedelta(hours=1)
    assert all(slow["costs_hours"] >= 0 for slow in result["held_back_by"])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"samples": 0}, "samples is 0: expected 1 or more"),
        ({"samples": "9"}, "samples is '9': expected a whole number"),
        ({"samples": True}, "samples is True: expected a whole number"),
        ({"output_tokens": 2.5}, "output_tokens is 2.5: expected a whole number"),
        ({"done": -1}, "done is -1: expected 0 or more"),
        ({"done": 11}, "done is 11 and samples is 10: more can't be done than there are"),
        ({"tok_s": 0}, "tok_s is 0: expected a number above 0"),
        ({"tok_s": float("nan")}, "tok_s is nan: expected a number above 0"),
        ({"tok_s": "fast"}, "tok_s is 'fast': expected a number"),
        ({"now": "2026-11-29T18:00:00"}, "expected a time with its zone"),
        ({"now": "tomorrow"}, "expected a time with its zone"),
        ({"servers": [server()]}, "no server's speed is known"),
        ({"servers": None}, "needs a list of servers, got NoneType"),
        ({"samples": 10**18, "output_tokens": 10**5}, "years: check samples, output_tokens and tok_s"),
    ],
)
def test_bad_input_is_one_sentence(change, said):
    arguments = {"servers": [server(tok_s=1.0)], "samples": 10, "output_tokens": 10, "now": NOW, **change}
    with pytest.raises(AnsibleError) as caught:
        eta(arguments.pop("servers"), **arguments)
    assert said in str(caught.value)


# Where speeds come from


def one(name="node1-gpu0", profile="nomtp", kind=("NVIDIA H200",), gpus=1):
    kind = list(kind) if kind is not None else None
    return {"name": name, "node": "node1", "gpus": gpus, "profile": profile, "model": "qwen3.6-27b", "kind": kind}


def test_a_server_has_its_own_speed_at_its_best_concurrency():
    (it,) = speeds([one()], curve("nomtp", {1: 69, 16: 923, 48: 917}), 256)
    assert (it["concurrency"], it["source"]) == (16, "measured")
    assert it["tok_s"] == {"median": 923, "min": 923 * 0.98, "max": 923 * 1.02, "runs": 3}


def test_others_have_that_of_their_kind_or_node():
    servers = [one("node1-gpu1"), one("node9-gpu0", kind=["NVIDIA L4"]), one("node1-gpu2", kind=None), one("x", "mtp")]
    found = speeds(servers, curve("nomtp", {16: 923}), 256)
    assert [it["source"] for it in found] == ["as node1-gpu0 (its kind)", None, "as node1-gpu0 (the same node)", None]
    assert [it["tok_s"] is None for it in found] == [False, True, False, True]
    (pair,) = speeds([one("node1-gpu4", kind=None, gpus=2)], curve("nomtp", {16: 923}), 256)
    assert pair["tok_s"] is None


def test_the_workload_nearest_to_the_job_counts():
    long = {**WORKLOAD, "id": "l", "name": "long", "output_tokens": 2048}
    text = {**WORKLOAD, "id": "p", "name": "long", "output_tokens": 2048, "source": "prompts", "prompts": 9}
    records = [*curve("nomtp", {16: 900}), *curve("nomtp", {16: 800}, workload=long), *curve("nomtp", {16: 700}, workload=text)]
    assert [speeds([one()], records, tokens)[0]["tok_s"]["median"] for tokens in (100, 2500)] == [900, 700]
    assert "9 prompts of a file" in report(eta(speeds([one()], records, 2500), 10, 2500, NOW), speeds([one()], records, 2500))


def test_a_workload_unlike_the_job_is_told():
    found = speeds([one()], curve("nomtp", {16: 900}), 2500)
    text = report(eta(found, 10, 2500, NOW), found)
    assert "measured, short: 128 in, 256 out, random tokens; unlike the job, which has 2,500 out" in " ".join(text.split())
    assert all(len(line) <= 72 for line in text.splitlines() if "done by" not in line and "between" not in line)
    assert "unlike the job" not in " ".join(report(eta(found, 10, 500, NOW), found).split())


def test_failed_runs_and_older_launches_and_series_do_not_count():
    records = [
        *curve("nomtp", {16: 100}, series="2026-01-01"),
        *curve("nomtp", {16: 200}, launch_sha256="older", at="2026-11-01T00:00:00.000Z"),
        *curve("nomtp", {16: 300}),
        record(runs=[run(48, 1e9, failed=1)], repeat=9),
    ]
    assert speeds([one()], records, 256)[0]["tok_s"]["median"] == 300


NEWER = {"series": "2026-12-01T00:00:00.000Z", "at": "2026-12-01T00:01:00.000Z"}


def test_a_newer_series_of_another_workload_hides_none_that_fits():
    like_it = {**WORKLOAD, "id": "l", "name": "long", "output_tokens": 128}
    other = {**WORKLOAD, "id": "s", "name": "short", "output_tokens": 64}
    records = [*curve("nomtp", {16: 300}, workload=like_it), *curve("nomtp", {16: 900}, workload=other, **NEWER)]
    found = [speeds([one()], records, tokens)[0] for tokens in (128, 64)]
    assert [(it["workload"]["name"], it["tok_s"]["median"]) for it in found] == [("long", 300), ("short", 900)]
    # Of other flags than the newest nothing counts, however near.
    flags = curve("nomtp", {16: 900}, workload=other, launch_sha256="newer", **NEWER)
    assert speeds([one()], [*records[:3], *flags], 128)[0]["workload"]["name"] == "short"


def test_a_series_that_was_cut_replaces_none_with_more_runs():
    finished = curve("nomtp", {1: 50, 16: 300}, repeats=2, spread=0)
    cut = curve("nomtp", {1: 90, 16: 900}, repeats=1, spread=0, **NEWER)
    assert speeds([one()], finished + cut, 256)[0]["tok_s"] == {"median": 300, "min": 300, "max": 300, "runs": 2}
    failed = [record(runs=[run(1, 9.0, failed=1)] * 9, **NEWER)]
    assert speeds([one()], finished + failed, 256)[0]["tok_s"]["median"] == 300
    gone_on_with = curve("nomtp", {1: 90, 16: 900}, repeats=2, spread=0, **NEWER)
    assert speeds([one()], finished + gone_on_with, 256)[0]["tok_s"]["median"] == 900


def test_of_equally_near_workloads_a_comparison_goes_before_benchmarks():
    benchmarks = curve("nomtp", {16: 500}, repeats=5, workload={**WORKLOAD, "id": "b", "name": "benchmark"}, series="")
    assert speeds([one()], [*benchmarks, *curve("nomtp", {16: 300})], 256)[0]["tok_s"]["median"] == 300


def test_what_is_not_known_is_told_beside_what_is():
    later = {"at": "2026-11-30T00:00:00.000Z"}
    records = [
        *curve("r4", {16: 300}, **later),
        *curve("r2", {16: 300}),
        *curve("far", {16: 9}, gpus=["NVIDIA L4"], server="x"),
    ]
    found = speeds([one(profile="r16"), one("node1-gpu1", "r16")], records, 256)
    assert [it["known_profiles"] for it in found] == [["r2", "r4"]] * 2
    with pytest.raises(AnsibleFilterError) as caught:
        eta(found, 10, 256, NOW)
    assert str(caught.value) == (
        "no server's speed with profile r16 is known (r2, r4 are: -e profile=r4): measure it with compare.yml or"
        " benchmark.yml, read it with -e live=true, or give the fleet's with -e tok_s=…"
    )
    found = speeds([one(profile="r16"), one("node1-gpu1", "r8")], records[3:6], 256)
    with pytest.raises(AnsibleFilterError, match=r"with profile r16 or r8 is known \(r2 is: -e profile=r2\): measure it"):
        eta(found, 10, 256, NOW)
    with pytest.raises(AnsibleFilterError, match="with profile r16 is known: measure it"):
        eta(speeds([one(profile="r16")], [], 256), 10, 256, NOW)
    assert speeds([one(profile="r2")], records, 256)[0]["known_profiles"] == []


def test_what_was_repeated_goes_before_a_single_benchmark():
    benchmark = record(runs=[run(16, 500)], series="", at="2026-12-01T00:00:00Z")
    (it,) = speeds([one()], [*curve("nomtp", {16: 300}), benchmark], 256)
    assert (it["tok_s"]["median"], it["tok_s"]["runs"]) == (300, 3)
    changed = {**benchmark, "launch_sha256": "newer"}
    assert speeds([one()], [*curve("nomtp", {16: 300}), changed], 256)[0]["tok_s"]["median"] == 500


def test_speeds_refuses_what_it_is_not_for():
    with pytest.raises(AnsibleTypeError, match="needs a list of servers and a list of records"):
        speeds({}, [], 1)
    with pytest.raises(AnsibleFilterError, match="output_tokens is 0"):
        speeds([], [], 0)


def test_words():
    assert told("2026-12-17T03:37+01:00") == "Thu 2026-12-17 03:37 +01:00"
    assert [number(value) for value in (3.14, 99.96, 1500, 129.6e6)] == ["3.1", "100.0", "1,500", "129,600,000"]
    assert [duration(hours) for hours in (0.5, 47.9, 48)] == ["0.5 h", "47.9 h", "48.0 h (2.0 days)"]
