# Copyright: sglang-fleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What the end of a swap says of one server, as its tasks are written."""

from __future__ import annotations

import pytest
from ansible.parsing.dataloader import DataLoader
from ansible.template import Templar


@pytest.mark.parametrize(
    ("outcome", "said"),
    [
        ("unrouted", "n-gpu0 runs what was wanted, and the roll ends with it: because"),
        ("reverted", "n-gpu0 was not swapped: because"),
        ("lost", "n-gpu0 was not swapped: because"),
    ],
)
def test_the_failure_of_a_server_says_whether_it_was_swapped(root, outcome, said):
    loader = DataLoader()
    tasks = loader.load_from_file(str(root / "roles/sglang_swap/tasks/summary.yml"), trusted_as_template=True)
    (fail,) = [task for task in tasks if task["name"] == "Fail for a server that was not swapped"]
    variables = {"inventory_hostname": "n-gpu0", "__sglang_swap_result": {"outcome": outcome, "why": "because"}}
    assert Templar(loader=loader, variables=variables).template(fail["ansible.builtin.fail"]["msg"]) == said


@pytest.mark.parametrize(
    ("brought", "undone"),
    [
        # The last roll was cut before it reached n-gpu1, which has its flags from the one before.
        ({"n-gpu0": ["20260102", "flags of 2"], "n-gpu1": ["20260101", "flags of 1"]}, ["n-gpu0"]),
        # One roll began it, and a second one finished it.
        ({"n-gpu0": ["20260101", "mtp"], "n-gpu1": ["20260102", "mtp"]}, ["n-gpu0", "n-gpu1"]),
        # One run, on unlike machines; and what is known by its run alone.
        ({"n-gpu0": ["20260101", "flags of A"], "n-gpu1": ["20260101", "flags of B"]}, ["n-gpu0", "n-gpu1"]),
        ({"n-gpu0": ["20260101", None], "n-gpu1": ["20260102", None]}, ["n-gpu1"]),
        ({"n-gpu0": ["20260101", "mtp"], "n-gpu1": None}, ["n-gpu0"]),
    ],
)
def test_a_rollback_undoes_what_the_last_run_brought_and_nothing_else(root, brought, undone):
    loader = DataLoader()
    known = loader.load_from_file(str(root / "roles/sglang_swap/vars/main.yml"), trusted_as_template=True)
    found = {
        name: {"__sglang_swap_found": {"brought": change and dict(zip(("run", "what"), change))}}
        for name, change in brought.items()
    }
    variables = {**known, "hostvars": found, "ansible_play_hosts_all": list(brought)}
    told = [
        name
        for name in brought
        if Templar(loader=loader, variables={**variables, "inventory_hostname": name}).template(known["__sglang_swap_undone"])
    ]
    assert told == undone
