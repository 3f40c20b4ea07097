# Copyright: sglang-fleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Sizes of batches, the gate's verdict, and what a swap is about to change."""

from __future__ import annotations

import json
import random

import pytest
from ansible.errors import AnsibleError, AnsibleFilterError, AnsibleTypeError
from sglang_swap import batches, changes, gate, plan_report, records


@pytest.mark.parametrize(
    ("count", "serial", "sizes"),
    [
        (16, ["1", "25%"], [1, 4, 4, 4, 3]),
        (2, ["1", "25%"], [1, 1]),
        (5, ["1", "50%"], [1, 2, 2]),
        (3, "1,100%", [1, 2]),
        (3, ["100%"], [3]),
        (7, [2], [2, 2, 2, 1]),
        (0, ["1"], []),
    ],
)
def test_batches_are_those_that_ansible_makes(count, serial, sizes):
    assert batches(count, serial) == sizes


@pytest.mark.parametrize("count", range(1, 20))
@pytest.mark.parametrize("serial", [["1", "25%"], ["30%"], ["2", "1", "40%"]])
def test_batches_are_those_of_ansibles_own_arithmetic(count, serial):
    from ansible.utils.helpers import pct_to_int

    left, sizes = count, []
    while left:
        step = pct_to_int(serial[min(len(sizes), len(serial) - 1)], count)
        sizes.append(min(step, left))
        left -= sizes[-1]
    assert batches(count, serial) == sizes


@pytest.mark.parametrize(
    ("serial", "error"), [(["0"], "'0'"), (["x%"], "'x%'"), ([], "expected a list"), (3, "expected a list")]
)
def test_a_serial_that_is_none_is_named(serial, error):
    with pytest.raises(AnsibleError, match=error):
        batches(4, serial)


def runs(*figures):
    return [{"output_tok_s": figure, "concurrency": 8} for figure in figures]


def test_noise_alone_is_not_worse():
    verdict = gate(runs(100, 104, 97, 101, 99), runs(99, 103, 98, 100, 98))
    assert (verdict["verdict"], verdict["pairs"], verdict["before_tok_s"]) == ("ok", 5, 100)
    assert -2 < verdict["change_percent"] < 0


def test_a_tenth_less_in_every_pair_is_worse():
    verdict = gate(runs(100, 140, 70, 100, 120), runs(90, 126, 63, 90, 108))
    assert verdict["verdict"] == "worse" and verdict["change_percent"] == -10.0
    assert "-10.0 % (-10.0 to -10.0 by 5 pairs; tolerated is -5 %)" in verdict["sentence"]


def test_what_noise_hides_is_unclear_and_what_is_tolerated_is_not_worse():
    assert gate(runs(100, 100, 100), runs(80, 120, 85))["verdict"] == "unclear"
    assert gate(runs(100, 100, 100), runs(88, 89, 88), tolerance=15)["verdict"] == "ok"
    assert gate(runs(100, 100), runs(130, 131))["verdict"] == "ok"


def test_equal_servers_are_called_worse_hardly_ever():
    dice = random.Random(7)
    noise = [[100 * dice.lognormvariate(0, 0.04) for _ in range(10)] for _ in range(2000)]
    # At exactly the tolerated loss the error of a one-sided 95 % bound is one in twenty, without a loss it is next to none.
    edge = sum(gate(runs(*n[:5]), runs(*(0.95 * x for x in n[5:])))["verdict"] == "worse" for n in noise) / len(noise)
    none = sum(gate(runs(*n[:5]), runs(*n[5:]))["verdict"] == "worse" for n in noise) / len(noise)
    assert 0.03 < edge < 0.07 and none < 0.005


@pytest.mark.parametrize(
    ("before", "after"), [(runs(1), runs(1)), (runs(1, 2), runs(1)), (runs(1, 2), runs(1, None)), (runs(0, 2), runs(1, 2))]
)
def test_a_gate_without_pairs_is_no_gate(before, after):
    with pytest.raises(AnsibleFilterError, match="the gate has"):
        gate(before, after)
    with pytest.raises(AnsibleTypeError):
        gate(before, "runs")


def boot(profile, *flags, python="/v/bin/python", env=None, **record):
    return {"profile": profile, "argv": [python, "-m", "x"], "env": env or {}, "record": {"flags": list(flags), **record}}


def test_servers_that_change_in_the_same_way_stand_together():
    before, after = boot("nomtp", ["--a", "1"], release="0.5.17"), boot("mtp", ["--a", "2"], ["--b"], release="0.5.18")
    moved = boot("mtp", ["--a", "2"], python="/w/bin/python", env={"X": "1"}, release="0.5.17")
    text = plan_report(
        [
            {"name": "n-gpu0", "work": True, "before": before, "after": after, "open": None},
            {"name": "n-gpu1", "work": True, "before": before, "after": after, "open": None},
            {"name": "n-gpu2", "work": True, "before": before, "after": moved, "open": {"who": "eve", "begun_at": "noon"}},
            {"name": "n-gpu3", "work": False, "before": before, "after": {}, "open": None},
        ]
    )
    assert text.split("\n") == [
        "n-gpu0, n-gpu1:",
        "  profile: nomtp -> mtp",
        "  release: 0.5.17 -> 0.5.18",
        "  a: 1 -> 2",
        "  b: unset -> set",
        "n-gpu2:",
        "  a swap by eve of noon is unfinished: taken up",
        "  compared with what ran before it:",
        "  profile: nomtp -> mtp",
        "  engine: /v/bin/python -> /w/bin/python",
        "  a: 1 -> 2",
        "  X: unset -> 1",
        "runs that already: n-gpu3",
    ]


@pytest.mark.parametrize(
    ("after", "more", "told"),
    [
        (["--a", "1"], {}, ["is unfinished: taken up, back to what ran before it"]),
        (
            ["--a", "2"],
            {"runs": True},
            [
                "is unfinished: taken up, and what is wanted runs already and is to be proven",
                "compared with what ran before it:",
                "a: 1 -> 2",
            ],
        ),
        (["--a", "1"], {"outcome": "unrouted"}, ["was not taken by the router: taken up, back to what ran before it"]),
    ],
)
def test_a_swap_that_is_taken_up_is_told_as_what_it_will_be(after, more, told):
    begun = {"who": "eve", "begun_at": "noon", "outcome": more.pop("outcome", None)}
    server = {"name": "n-gpu0", "work": True, "before": boot("nomtp", ["--a", "1"]), "after": boot("nomtp", after)}
    lines = plan_report([{**server, "open": begun, **more}]).split("\n")
    assert lines == ["n-gpu0:", f"  a swap by eve of noon {told[0]}", *(f"  {line}" for line in told[1:])]


def test_where_only_keys_differ_that_is_told():
    server = {"name": "n-gpu0", "work": True, "before": boot("nomtp"), "after": boot("nomtp"), "open": None}
    assert plan_report([server]) == "n-gpu0:\n  keys or script"


def test_a_history_has_no_values_of_the_environment():
    before, after = boot("nomtp", ["--a", "1"]), boot("nomtp", ["--a", "2"], env={"TOKEN": "of mine"})
    assert changes(before, after) == ["a: 1 -> 2", "TOKEN: unset -> of mine"]
    assert changes(before, after, values=False) == ["a: 1 -> 2", "TOKEN: changed"]


def test_a_controllers_damaged_record_is_named_and_the_others_are_told(monkeypatch):
    warned = []
    monkeypatch.setattr("sglang_swap.Display.warning", lambda self, text: warned.append(text))
    server = {"name": "n-gpu0", "result": {"outcome": "kept", "why": "because"}, "from": "nomtp", "to": "mtp"}
    other = {**server, "name": "n-gpu1", "result": {"outcome": "unchanged"}}
    swap = {"ended_at": "2026-01-01T00:00:00Z", "who": "alice", "run": "r1", "servers": [server, other]}
    whole = json.dumps(swap)
    damaged = [whole[:40], "7", json.dumps({**swap, "servers": [{"name": "n-gpu0"}]}), "{}"]
    files = [(f"/a/{number}.json", text) for number, text in enumerate([*damaged, whole])]
    (told,) = records(files, ["n-gpu0", "n-gpu1"])
    assert (told["server"], told["what"], told["why"], told["after"]) == ("n-gpu0", "kept", "because", "mtp")
    assert [text.split(" ")[0] for text in warned] == [f"/a/{number}.json" for number in range(4)]
    assert all(text.endswith("so nothing of it is told: move it away") for text in warned)
