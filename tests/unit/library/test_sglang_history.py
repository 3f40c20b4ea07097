# Copyright: sglang-fleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The histories of a node's servers."""

from __future__ import annotations

import pytest
from ansible.module_utils.sglang_state import Paths, remember, write_state
from helpers.swap import begun


@pytest.fixture
def module(load):
    return load("library", "sglang_history")


def test_entries_of_several_servers_come_in_order_and_a_cut_line_is_left_out(module, call, warned, tmp_path, monkeypatch):
    times = iter(["2026-01-01T00:00:03Z", "2026-01-01T00:00:01Z", "2026-01-01T00:00:02Z"])
    monkeypatch.setattr("ansible.module_utils.sglang_state.utc_now", lambda: next(times))
    for slug, what in (("sglang_gpu0", "swapped"), ("sglang_gpu1", "started"), ("sglang_gpu1", "stopped")):
        remember(Paths(str(tmp_path), slug), server=slug, what=what, who="alice")
    with open(Paths(str(tmp_path), "sglang_gpu1").history, "a", encoding="utf-8") as stream:
        stream.write('{"at": 5, "server": "sglang_gpu1", "what": "stopped"}\n')
        stream.write(
            '{"at": "2026-01-01T00:00:09Z", "server": "sglang_gpu1", "what": "swapped", "changes": 7}\n[7]\n{"at": "2026-'
        )
    answer = call(module, {"root": str(tmp_path), "slugs": ["sglang_gpu0", "sglang_gpu1", "sglang_gpu2"]})
    assert answer["changed"] is False
    assert [entry["what"] for entry in answer["entries"]] == ["started", "stopped", "swapped"]
    assert warned == [
        f"{Paths(str(tmp_path), 'sglang_gpu1').history}: 4 of 6 lines are damaged and not told: look at them there"
    ]
    newest = call(module, {"root": str(tmp_path), "slugs": ["sglang_gpu1"], "limit": 1})
    assert [entry["what"] for entry in newest["entries"]] == ["stopped"]


def test_a_server_without_history_has_none(module, call, tmp_path):
    assert call(module, {"root": str(tmp_path), "slugs": ["sglang_gpu0"]})["entries"] == []


def test_a_swap_without_an_end_is_open(module, call, warned, tmp_path):
    paths = Paths(str(tmp_path), "sglang_gpu0")
    paths.make()
    write_state(paths.swap, begun())
    (entry,) = call(module, {"root": str(tmp_path), "slugs": ["sglang_gpu0"]})["entries"]
    assert (entry["server"], entry["what"], entry["who"], entry["at"]) == ("n-gpu0", "open", "bob@desk", begun()["begun_at"])
    assert (entry["before"], entry["after"]) == (
        {"profile": "nomtp"},
        {"profile": "mtp"},
    ) and "the next swap.yml takes it up" in entry["why"]
    write_state(paths.swap, begun(run=None))
    damaged = call(module, {"root": str(tmp_path), "slugs": ["sglang_gpu0"]})
    assert damaged["entries"] == [] and "its run is missing" in warned[0]
    write_state(paths.swap, begun(outcome="swapped"))
    assert call(module, {"root": str(tmp_path), "slugs": ["sglang_gpu0"]})["entries"] == []
