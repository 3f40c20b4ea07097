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
        ("unrouted", "n-gpu0 was swapped, and the roll ends with it: because"),
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
