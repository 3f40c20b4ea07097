# Copyright: sglang-fleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The action sglang_router_spec: the filter's answer as a task's result, its refusal as one sentence."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from ansible.errors import AnsibleActionFail

REQUEST = {
    "node": "n", "nodes": ["n"], "host": "127.0.0.1", "port": 1, "metrics_port": 2, "root": "/r", "slug": "s", "venv": "/v",
    "key": False, "defaults": {}, "args": {}, "servers": [],
}  # fmt: skip


@pytest.fixture
def run(load, monkeypatch):
    plugin = load("action_plugins", "sglang_router_spec")
    monkeypatch.setattr(plugin.ActionBase, "run", lambda self, tmp=None, task_vars=None: {})

    def _run(**args):
        action = plugin.ActionModule.__new__(plugin.ActionModule)
        action._task = SimpleNamespace(args=args)
        return action.run(None, {})

    return _run


def test_the_answer_is_the_filters(run):
    result = run(**REQUEST)
    assert result["changed"] is False and result["spec"]["url"] == "http://127.0.0.1:1"


def test_a_refusal_is_one_sentence(run):
    with pytest.raises(AnsibleActionFail) as caught:
        run(**{**REQUEST, "node": "m"})
    assert caught.value.message == "sglang_router_node is 'm': nodes of this inventory are n"
