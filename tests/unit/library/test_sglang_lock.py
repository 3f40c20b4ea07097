# Copyright: sglang-fleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The file that says who swaps the fleet."""

from __future__ import annotations

import os
import time

import pytest
from ansible.module_utils.sglang_state import read_state, write_state


@pytest.fixture
def module(load):
    return load("library", "sglang_lock")


@pytest.fixture
def held(module, call, tmp_path):
    def _held(run="r1", who="alice@laptop", check=False, **more):
        return call(module, {"root": str(tmp_path), "holder": {"run": run, "who": who, "pid": 1}, **more}, check=check)

    _held.path = tmp_path / "run" / "swap.lock.json"
    return _held


def test_a_free_lock_is_taken_kept_and_left(held):
    first = held(silence=60)
    assert (first["changed"], first["taken_over"], first["holder"]["who"]) == (False, None, "alice@laptop")
    assert 50 < first["holder"]["until_epoch"] - time.time() <= 61
    second = held(silence=600)
    assert second["holder"]["since"] == first["holder"]["since"] and second["taken_over"] is None
    assert second["holder"]["until_epoch"] > first["holder"]["until_epoch"]
    assert held(state="free")["holder"] is None and not held.path.exists()


def test_a_held_lock_is_refused_with_its_holder(held):
    first = held()
    answer = held(run="r2", who="bob@desk")
    assert (answer["rc"], answer["cause"], answer["holder"]) == (1, "held", {**first["holder"], "schema": 1})
    assert held(run="r2", who="bob@desk", state="free")["holder"]["run"] == "r1", "it is not ours to leave"
    assert read_state(str(held.path))["run"] == "r1"


@pytest.mark.parametrize("named", ["r1", "*"])
def test_a_dead_holder_is_put_aside_by_name(held, named):
    held()
    answer = held(run="r2", who="bob@desk", take_over=named)
    assert (answer["holder"]["run"], answer["taken_over"]["who"]) == ("r2", "alice@laptop")
    assert "another" not in named and held(run="r3", who="eve", take_over="r1")["cause"] == "held"


def test_a_holder_whose_time_is_over_holds_nothing(held):
    held()
    write_state(str(held.path), {**read_state(str(held.path)), "until_epoch": time.time() - 1})
    assert held(run="r2", who="bob@desk")["holder"]["run"] == "r2"


@pytest.mark.parametrize(
    ("lacks", "what"),
    [
        ({"until_epoch": float("inf")}, "until_epoch is float"),
        ({"who": None}, "who is missing"),
        ({"until": None}, "until is missing"),
        ({"pid": None}, "pid is missing"),
    ],
)
def test_a_damaged_lock_holds_nothing_and_is_told(held, warned, lacks, what):
    held()
    write_state(str(held.path), {**read_state(str(held.path)), **lacks})
    answer = held(run="r2", who="bob@desk")
    assert (answer["rc"], answer["holder"]["run"], answer["taken_over"]) == (0, "r2", None)
    assert warned == [
        f"{held.path} is damaged, its {what}: it is taken as absent; see that nobody else changes the same servers now"
    ]


def test_the_lock_of_a_server_is_another_than_that_of_the_fleet(held):
    held()
    answer = held(run="r2", who="bob@desk", name="sglang_gpu0.compare")
    assert answer["holder"]["run"] == "r2" and held.path.with_name("sglang_gpu0.compare.lock.json").exists()
    assert held(run="r1", name="sglang_gpu0.compare")["cause"] == "held"
    assert held(run="r1", name="sglang_gpu1.compare")["rc"] == 0


def test_check_mode_looks_and_takes_nothing(held):
    assert held(check=True)["rc"] == 0 and not held.path.exists()
    held()
    assert held(run="r2", who="bob@desk", check=True)["cause"] == "held"


def test_a_holder_without_a_name_and_a_folder_that_takes_nothing_are_errors(held, module, call, tmp_path):
    for holder in ({}, {"run": "r1", "who": "alice"}, {"run": "", "who": "alice", "pid": 1}):
        assert "expected at least run, who and pid" in call(module, {"root": str(tmp_path), "holder": holder})["msg"]
    os.makedirs(tmp_path / "run" / "swap.lock.json")
    assert "can't be written" in held()["msg"]
