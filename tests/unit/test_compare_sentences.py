# Copyright: sglang-fleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What the end of a comparison says of one server, as its tasks are written."""

from __future__ import annotations

import pytest
from ansible.parsing.dataloader import DataLoader
from ansible.template import Templar

DIED = {"profile": "dies", "launch_sha256": "abc", "error": "n.cpu0 did not become ready: it ended with exit code 1: no memory"}
HUGE = {"profile": "huge", "launch_sha256": None, "error": "the plan does not fit"}
PUT_BACK = "n.cpu0 is not as it was before: no memory"


@pytest.fixture
def role(root):
    loader = DataLoader()

    def _load(path):
        return loader.load_from_file(str(root / "roles/sglang_compare" / path), trusted_as_template=True)

    def _template(text, **variables):
        known = {"inventory_hostname": "n.cpu0", **_load("vars/main.yml"), **variables}
        return Templar(loader=loader, variables=known).template(text)

    _template.load = _load
    return _template


@pytest.mark.parametrize(
    ("refusals", "failures", "after", "said"),
    [
        (
            [DIED, HUGE],
            [],
            "n.cpu0 runs r16 again, as before",
            "profile dies did not start on n.cpu0: it ended with exit code 1: no memory;"
            " profile huge can't be started on n.cpu0: the plan does not fit; n.cpu0 runs r16 again, as before",
        ),
        ([HUGE], [], "", "profile huge can't be started on n.cpu0: the plan does not fit"),
        (
            [DIED],
            [PUT_BACK],
            "",
            f"{PUT_BACK}; profile dies did not start on n.cpu0: it ended with exit code 1: no memory",
        ),
    ],
)
def test_the_failure_names_the_profile_and_what_runs_again(role, refusals, failures, after, said):
    (fail,) = [task for task in role.load("tasks/report.yml") if task["name"].startswith("Fail for what could not be")]
    told = {"__sglang_compare_refusals": refusals, "__sglang_compare_failures": failures, "__sglang_compare_after": after}
    assert role(fail["ansible.builtin.assert"]["fail_msg"], **told, **fail["vars"]) == said


@pytest.mark.parametrize(
    ("before", "said"),
    [
        ({"pid": 7, "profile": "r16"}, "n.cpu0 runs r16 again, as before"),
        ({"pid": None, "profile": None}, "n.cpu0 is stopped again, as it was"),
    ],
)
def test_what_was_put_back_is_named(role, before, said):
    (block,) = role.load("tasks/put_back.yml")
    (note,) = [task for task in block["block"] if task["name"] == "Note what it is now"]
    text = note["ansible.builtin.set_fact"]["__sglang_compare_after"]
    assert role(text, __sglang_compare_before=before) == said
