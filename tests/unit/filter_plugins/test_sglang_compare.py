# Copyright: sglang-fleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Profiles side by side: medians of what is alike, nothing averaged that failed, and the point where one overtakes."""

from __future__ import annotations

import random
import re
import statistics

import pytest
from ansible.errors import AnsibleError, AnsibleFilterError, AnsibleTypeError
from ansible.module_utils.sglang_benchmark import parse_records, summarise
from helpers.compare import MTP, WORKLOAD, curve, record, refused, run
from hypothesis import given
from hypothesis import strategies as st
from sglang_compare import caveats, compare, comparisons, crossover, report, shown, stat

SPEEDS = st.floats(min_value=0.1, max_value=1e5, allow_nan=False)


def cell(comparison, profile, concurrency):
    (found,) = [one for one in comparison["profiles"] if one["name"] == profile]
    (it,) = [one for one in found["cells"] if one["concurrency"] == concurrency]
    return it


def figure(*values):
    return stat(list(values))


def line(**speeds):
    """A curve from ``c1=100``: three runs at each concurrency, one percent apart."""
    return [{"concurrency": int(at[1:]), "tok_s": figure(speed * 0.99, speed, speed * 1.01)} for at, speed in speeds.items()]


# Figures


def test_a_figure_is_median_range_and_number():
    result = compare([record(runs=[run(1, speed)], repeat=n) for n, speed in enumerate([100.0, 104.0, 90.0, 101.0], 1)])
    assert cell(result, "nomtp", 1)["output_tok_s"] == {"median": 100.5, "min": 90.0, "max": 104.0, "runs": 4}


@given(st.lists(SPEEDS, min_size=1, max_size=7), st.randoms())
def test_figures_do_not_depend_on_the_order_of_records(speeds, shuffled):
    records = [record(runs=[run(4, speed)], repeat=n) for n, speed in enumerate(speeds, 1)]
    before = compare(records)["profiles"][0]["cells"]
    shuffled.shuffle(records)
    assert compare(records)["profiles"][0]["cells"] == before
    told = before[0]["output_tok_s"]
    assert told["median"] == round(statistics.median(speeds), 3)
    assert told["min"] <= told["median"] <= told["max"]
    assert (told["runs"], before[0]["runs"], before[0]["failed"]) == (len(speeds), len(speeds), 0)


@given(st.lists(SPEEDS, min_size=1, max_size=4), st.lists(st.integers(1, 9), max_size=4))
def test_a_run_with_errors_is_counted_and_never_averaged_in(speeds, failures):
    good = [record(runs=[run(8, speed)], repeat=n) for n, speed in enumerate(speeds, 1)]
    bad = [
        record(runs=[run(8, 1e9, failed=n)], repeat=90 + n, outcome="failed", error=f"{n} of 32 requests failed")
        for n in failures
    ]
    with_errors, without = compare(good + bad), compare(good)
    it = cell(with_errors, "nomtp", 8)
    assert it["failed"] == len(failures)
    assert {**it, "failed": 0} == cell(without, "nomtp", 8)
    assert len(with_errors["profiles"][0]["errors"]) == len(failures)


def test_the_good_runs_of_a_record_that_failed_count():
    bad = record(runs=[run(1, 50.0), run(8, 9.0, failed=2)], outcome="failed", error="2 of 32 requests failed")
    result = compare([bad])
    assert cell(result, "nomtp", 1)["output_tok_s"]["median"] == 50.0
    assert (cell(result, "nomtp", 8)["output_tok_s"], cell(result, "nomtp", 8)["failed"]) == (None, 1)
    assert result["profiles"][0]["errors"] == [{"server": "node1-gpu0", "repeat": 1, "error": "2 of 32 requests failed"}]


def test_figures_are_those_of_bench_serving(root):
    """The same JSONL, bench_serving's own words against ours."""
    own = parse_records((root / "tests/data/bench_serving/measured.jsonl").read_text(encoding="utf-8"))
    result = compare([record(runs=[summarise(one, 1) for one in own])])
    assert [one["max_concurrency"] for one in own] == [one["concurrency"] for one in result["profiles"][0]["cells"]]
    for one in own:
        it = cell(result, "nomtp", one["max_concurrency"])
        for ours, theirs in {
            "output_tok_s": "output_throughput",
            "total_tok_s": "total_throughput",
            "ttft_ms": "median_ttft_ms",
            "ttft_p99_ms": "p99_ttft_ms",
            "tpot_ms": "median_tpot_ms",
            "tpot_p99_ms": "p99_tpot_ms",
        }.items():
            value = round(one[theirs], 3)
            assert it[ours] == {"median": value, "min": value, "max": value, "runs": 1}, ours


def test_start_and_memory_have_their_spread():
    mtp = compare(curve("mtp", {1: 100}))["profiles"][0]
    assert mtp["ready_s"] == {"median": 91.0, "min": 90.0, "max": 92.0, "runs": 3}
    assert mtp["stages"]["import"]["median"] == 42.0
    assert list(mtp["stages"])[0] == "import"
    (tokens,) = [row for row in mtp["memory"] if row["figure"] == "kv_tokens"]
    assert (tokens["planned"]["median"], tokens["observed"]["median"], tokens["observed"]["runs"]) == (367751, 365151, 3)


def test_without_a_plan_memory_is_what_was_observed():
    unplanned = record(runs=[run(1, 10)])
    unplanned["boot"] = {**unplanned["boot"], "memory": [], "observed": {"kv_tokens": 8192, "state_slots": None, "other": 1}}
    (row,) = compare([unplanned])["profiles"][0]["memory"]
    assert row == {"figure": "kv_tokens", "planned": None, "observed": {"median": 8192, "min": 8192, "max": 8192, "runs": 1}}


def test_one_boot_that_served_two_workloads_counts_once():
    both = [record(runs=[run(1, 10)]), record(runs=[run(4, 10)], at="2026-11-29T10:02:00.000Z")]
    assert compare(both)["profiles"][0]["boots"] == 1


# What is refused


@pytest.mark.parametrize(
    ("change", "differs"),
    [
        ({"workload": {**WORKLOAD, "id": "ffff", "output_tokens": 512}}, "they differ in workload: short: 128 in, 256 out"),
        ({"model": "another"}, "they differ in model: qwen3.6-27b; another"),
        ({"model_path": "/srv/b"}, "they differ in model files: /srv/models/Qwen3.6-27B; /srv/b"),
        ({"release": "0.5.23"}, "they differ in release: SGLang 0.5.17; SGLang 0.5.23"),
        ({"gpus": ["NVIDIA L4"]}, "they differ in GPU: NVIDIA H200; NVIDIA L4"),
    ],
)
def test_unlike_results_are_refused_by_what_differs(change, differs):
    with pytest.raises(AnsibleFilterError) as caught:
        compare([record(runs=[run(1, 10)]), record("mtp", runs=[run(1, 10)], **change)])
    assert differs in str(caught.value)


def test_a_profile_with_unlike_flags_is_refused_by_the_flag():
    with pytest.raises(AnsibleFilterError, match="nomtp ran on node1-gpu0 with unlike flags: mem-fraction-static: 0.85 -> 0.9"):
        compare(
            [
                record(runs=[run(1, 10)]),
                record(runs=[run(1, 10)], flags=[["--mem-fraction-static", "0.9"]], launch_sha256="other"),
            ]
        )


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"output_tok_s": "69"}, "output_tok_s of a run at concurrency 4 is '69': expected a number"),
        ({"ttft_ms": {"median": True, "p99": 1.0}}, "ttft_ms.median of a run at concurrency 4 is True: expected a number"),
    ],
)
def test_a_figure_that_is_no_number_is_one_sentence(change, said):
    with pytest.raises(AnsibleTypeError) as caught:
        compare([record(runs=[run(4, 69.0, **change)])])
    assert said in str(caught.value)


@pytest.mark.parametrize("bad", [None, "records", [1], {"a": 1}])
def test_what_is_no_list_of_records_is_refused(bad):
    with pytest.raises(AnsibleTypeError, match="needs a list of records"):
        compare(bad)


def test_a_record_of_another_version_is_refused():
    with pytest.raises(AnsibleFilterError, match="has schema 2: expected 1"):
        compare([record(schema=2)])


def test_nothing_measured_is_refused():
    with pytest.raises(AnsibleFilterError, match="nothing to compare"):
        compare([refused("mtp", "why")])


# Many comparisons


def test_records_fall_apart_by_workload_model_release_and_gpu():
    other = {**WORKLOAD, "id": "ffff", "name": "long"}
    records = [
        *curve("nomtp", {1: 10}),
        *curve("nomtp", {1: 10}, workload=other),
        *curve("nomtp", {1: 10}, release="0.5.23"),
        *curve("nomtp", {1: 10}, model_path="/srv/other", release="0.5.23"),
        *curve("nomtp", {1: 10}, gpus=["NVIDIA L4"], server="node2-gpu0"),
    ]
    found = comparisons(records)
    assert [(one["gpus"], one["release"], one["workload"]["name"]) for one in found] == [
        (["NVIDIA H200"], "0.5.17", "long"),
        (["NVIDIA H200"], "0.5.17", "short"),
        (["NVIDIA H200"], "0.5.23", "short"),
        (["NVIDIA H200"], "0.5.23", "short"),
        (["NVIDIA L4"], "0.5.17", "short"),
    ]


def test_only_the_newest_series_counts_and_the_newest_flags_in_it():
    old = curve("nomtp", {1: 10}, series="2026-01-01T00:00:00.000Z")
    changed = record(runs=[run(1, 30)], repeat=4, launch_sha256="newer", flags=[["--mem-fraction-static", "0.9"]])
    (one,) = comparisons([changed, *old, *curve("nomtp", {1: 20})])
    assert cell(one, "nomtp", 1)["output_tok_s"] == {"median": 30, "min": 30, "max": 30, "runs": 1}
    (two,) = comparisons([*old, *curve("nomtp", {1: 20})])
    assert cell(two, "nomtp", 1)["output_tok_s"]["median"] == 20


def test_only_what_is_asked_for_is_shown():
    records = [*curve("nomtp", {1: 10}), *curve("mtp", {1: 20}), *curve("other", {1: 30}), refused("broken", "no such flag")]
    (asked,) = comparisons(records, ["nomtp", "mtp"])
    assert [profile["name"] for profile in asked["profiles"]] == ["nomtp", "mtp"]
    assert asked["crossover"]["winners"][0]["profile"] == "mtp"
    assert [profile["name"] for profile in comparisons(records)[0]["profiles"]] == ["nomtp", "mtp", "other", "broken"]
    with pytest.raises(AnsibleTypeError, match="profiles is 'nomtp': expected a list of names"):
        comparisons(records, "nomtp")


def test_a_profile_that_did_not_start_is_told_and_others_stay():
    late = refused("nomtp", "out of memory", repeat=2, launch_sha256=None, at="2026-11-29T11:00:00.000Z")
    (one,) = comparisons([*curve("nomtp", {1: 10}), refused("mtp", "no such flag"), late])
    assert {profile["name"]: [row["error"] for row in profile["refused"]] for profile in one["profiles"]} == {
        "nomtp": ["out of memory"],
        "mtp": ["no such flag"],
    }
    assert cell(one, "nomtp", 1)["runs"] == 3


def test_a_start_that_failed_alike_in_each_run_is_told_once():
    def again(minute, error):
        return refused("mtp", error, at=f"2026-11-29T11:0{minute}:00.000Z")

    errors = ["no memory: 12 MiB free", "no memory: 13 MiB free", "no such flag", "no memory: 9 MiB free"]
    starts = [again(minute, error) for minute, error in enumerate(errors)]
    (one,) = comparisons([*curve("nomtp", {1: 10}), *reversed(starts)])
    rows = one["profiles"][-1]["refused"]
    assert [(row["error"], row["times"]) for row in rows] == [("no memory: 9 MiB free", 3), ("no such flag", 1)]
    text = report([one]).replace("\n", " ")
    assert "mtp on node1-gpu0 did not start (3 times): no memory: 9 MiB free" in text
    assert "mtp on node1-gpu0 did not start (repeat 1): no such flag" in text and text.count("did not start") == 2


def test_what_is_uneven_is_noted():
    result = compare([*curve("nomtp", {1: 10}), *curve("mtp", {1: 10}, server="node1-gpu1")])
    assert result["notes"] == ["nomtp was measured on node1-gpu0 only", "mtp was measured on node1-gpu1 only"]


def test_a_driver_that_changed_is_noted():
    result = compare([*curve("nomtp", {1: 10}), *curve("mtp", {1: 10}, driver="590.1", at="2026-11-30T10:00:00.000Z")])
    assert result["notes"] == ["the driver differs between the runs: 580.95.05 (nomtp); 590.1 (mtp)"]
    assert result["drivers"] == ["580.95.05", "590.1"]


# Speculation


def test_figures_of_speculation_say_what_they_are_not():
    plain = record("nomtp", env={"SGLANG_SIMULATE_ACC_LEN": "3.2"})
    assert caveats(plain) == []
    said = caveats(record("mtp", env={"SGLANG_SIMULATE_ACC_LEN": "3.2"}, flags=[*MTP, ["--load-format", "dummy"]]))
    assert [sentence.partition(" ")[0] for sentence in said] == ["acceptance", "weights", "acceptance"]
    assert "SGLANG_SIMULATE_ACC_LEN=3.2" in said[0]
    prompts = {**WORKLOAD, "source": "prompts", "prompts": 99}
    assert caveats(record("mtp", workload=prompts)) == []


def test_a_mark_stands_beside_every_figure_of_it():
    result = compare([*curve("nomtp", {1: 10, 8: 90}), *curve("mtp", {1: 20, 8: 60}, accept=2.5)])
    text = report([result])
    lines = [row for row in text.splitlines() if re.match(r"mtp\*? +\d", row)]
    assert len(lines) == 5 and all(row.startswith("mtp* ") for row in lines)
    assert "mtp* wins up to" in text
    assert "* mtp: acceptance on random tokens says nothing of a job's text" in text
    assert result["crossover"]["winners"][0]["profile"] == "mtp"


# Crossover


def test_the_crossover_is_named():
    told = crossover({"mtp": line(c8=600, c16=700), "nomtp": line(c8=480, c16=820)})
    assert told["text"].startswith("mtp wins up to 12 concurrent, nomtp above")
    assert told["crossings"] == [{"below": "mtp", "above": "nomtp", "at": 12, "between": [8, 16]}]
    assert told["segments"] == [{"profile": "mtp", "from": 8, "to": 8}, {"profile": "nomtp", "from": 16, "to": 16}]
    assert [winner["clear"] for winner in told["winners"]] == [True, True]


def test_one_winner_everywhere():
    told = crossover({"a": line(c1=10, c4=40), "b": line(c1=9, c4=20)})
    assert told["text"] == "a wins at every concurrency measured (1 to 4)"
    assert told["crossings"] == []


def test_what_is_within_the_spread_is_said():
    told = crossover({"a": line(c1=100, c4=100), "b": line(c1=99.5, c4=10)})
    assert told["winners"][0]["clear"] is False
    assert told["text"].endswith("; within the spread of the repeats at 1")


def test_single_runs_have_no_spread():
    told = crossover({name: [{"concurrency": 1, "tok_s": figure(speed)}] for name, speed in (("a", 2.0), ("b", 1.0))})
    assert told["winners"][0]["clear"] is None
    assert told["text"].endswith("; single runs, so the spread is not known")


def test_a_third_that_was_measured_once_hides_no_spread():
    two = {"a": line(c1=100, c4=100), "b": line(c1=99.5, c4=10)}
    third = [{"concurrency": at, "tok_s": figure(5.0)} for at in (1, 4)]
    told = crossover({**two, "c": third})
    assert [winner["clear"] for winner in told["winners"]] == [False, True]
    assert told["text"].endswith("; within the spread of the repeats at 1")
    # One run that lies in the range of the winner is within the spread too; one that does not tells nothing.
    once = [{"concurrency": 1, "tok_s": figure(99.5)}, {"concurrency": 4, "tok_s": figure(10.0)}]
    told = crossover({"a": two["a"], "b": once})
    assert [winner["clear"] for winner in told["winners"]] == [False, None]
    assert told["text"].endswith("at 1; single runs at 4, so the spread is not known")


def test_without_two_profiles_there_is_nothing_to_compare():
    assert crossover({"a": line(c1=1), "b": line(c4=1)})["text"] == "nothing to compare: a, b have no concurrency in common"
    assert crossover({"a": line(c1=1)})["text"] == "nothing to compare: only a was measured"
    assert crossover({}) == {
        "winners": [], "segments": [], "crossings": [],
        "text": "nothing to compare: no profile was measured without a failed request",
    }  # fmt: skip


@pytest.mark.parametrize("bad", [0, -1.0, True, None, {"median": 0}, {"median": -1}])
def test_a_speed_that_is_none_is_refused(bad):
    with pytest.raises(AnsibleError):
        crossover({"a": [{"concurrency": 1, "tok_s": bad}], "b": line(c1=1)})


CURVES = st.dictionaries(
    st.sampled_from(["a", "b", "c", "d"]),
    st.dictionaries(st.integers(1, 64), SPEEDS, min_size=1, max_size=6),
    min_size=2,
    max_size=4,
)


@given(CURVES, st.integers(1, 3))
def test_a_crossover_holds_together(curves, runs):
    given_curves = {
        name: [{"concurrency": at, "tok_s": figure(*[speed] * runs)} for at, speed in points.items()]
        for name, points in curves.items()
    }
    told = crossover(given_curves)
    for winner in told["winners"]:
        speeds = {name: points[winner["concurrency"]] for name, points in curves.items() if winner["concurrency"] in points}
        assert speeds[winner["profile"]] == pytest.approx(max(speeds.values()), abs=1e-3)
    covered = [(one["from"], one["to"]) for one in told["segments"]]
    assert covered == sorted(covered)
    assert len(told["crossings"]) == max(0, len(told["segments"]) - 1)
    for crossing, before, after in zip(told["crossings"], told["segments"], told["segments"][1:]):
        assert (crossing["below"], crossing["above"]) == (before["profile"], after["profile"])
        assert crossing["between"] == [before["to"], after["from"]]
        assert crossing["at"] is None or before["to"] <= crossing["at"] < after["from"]
        assert crossing["below"] != crossing["above"]
    shuffled = list(given_curves.items())
    random.Random(1).shuffle(shuffled)
    assert crossover(dict(shuffled)) == told


@given(st.integers(1, 20), st.integers(21, 64), SPEEDS, SPEEDS, st.floats(0.01, 100))
def test_a_crossing_does_not_depend_on_the_unit(low, high, slow, fast, factor):
    def at(scale):
        one = [
            {"concurrency": low, "tok_s": {"median": fast * 2 * scale, "min": 1, "max": 1, "runs": 1}},
            {"concurrency": high, "tok_s": {"median": slow * scale, "min": 1, "max": 1, "runs": 1}},
        ]
        two = [
            {"concurrency": low, "tok_s": {"median": fast * scale, "min": 1, "max": 1, "runs": 1}},
            {"concurrency": high, "tok_s": {"median": slow * 2 * scale, "min": 1, "max": 1, "runs": 1}},
        ]
        (crossing,) = crossover({"one": one, "two": two})["crossings"]
        return crossing["at"]

    assert abs(at(1) - at(factor)) <= 1  # a rounding at the very number


# Text


def test_a_figure_as_text():
    assert shown(None) is None
    assert shown(figure(1738.25)) == "1738.2"
    assert shown(figure(1.0, 2.0, 4.0), 2) == "2.00 (1.00-4.00)"
    assert shown(figure(0.011, 0.012, 0.0141), 2) == "0.01", "a spread that does not show is none"


def test_tables_keep_to_their_columns():
    result = compare([*curve("nomtp", {1: 69.0, 48: 1917.0}), *curve("mtp_hicache", {1: 160.0, 48: 2820.0}, accept=3.2)])
    single = curve("mtp", {1: 161.0, 48: 1918.0}, repeats=1)
    for found in (result, compare([*curve("nomtp", {1: 69.0, 48: 1917.0}), *single, refused("broken", "a reason " * 20)])):
        assert max(len(row) for row in report([found]).splitlines()) <= 72


def test_errors_and_refusals_are_told():
    bad = record("mtp", runs=[run(8, 9.0, failed=2)], outcome="failed", error="2 of 32 requests failed")
    text = report(comparisons([*curve("nomtp", {8: 10}), bad, refused("mtp_hicache", "no host memory")])).replace("\n", " ")
    assert "mtp on node1-gpu0 had errors (repeat 1), not averaged in: 2 of 32 requests failed" in text
    assert "mtp_hicache on node1-gpu0 did not start (repeat 1): no host memory" in text
    assert "0, 1 failed" in text


def test_without_records_the_report_says_how_to_get_some():
    assert report(comparisons([])) == "Nothing was measured yet: compare.yml measures profiles."
