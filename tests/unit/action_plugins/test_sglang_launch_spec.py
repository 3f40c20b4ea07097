# Copyright: sglang-fleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The action sglang_launch_spec: the filter's answer as a task's result, its refusal as one sentence."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from ansible.errors import AnsibleActionFail


@pytest.fixture
def run(load, monkeypatch):
    plugin = load("action_plugins", "sglang_launch_spec")
    warned = []
    monkeypatch.setattr(plugin.ActionBase, "run", lambda self, tmp=None, task_vars=None: {})
    monkeypatch.setattr(plugin, "display", SimpleNamespace(warning=warned.append))

    def _run(**args):
        action = plugin.ActionModule.__new__(plugin.ActionModule)
        action._task = SimpleNamespace(args=args)
        return action.run(None, {}), warned

    return _run


REQUEST = {
    "name": "n-gpu0", "node": "n", "slug": "s", "gpus": [0], "host": "127.0.0.1", "port": 1, "root": "/r", "profile": "p",
    "profiles": {"p": {}}, "model": "m", "models": {"m": {"path": "/m"}}, "devices": {"cuda": {}},
    "releases": {"known": ["0.5.17"]}, "engine": {"venv": "/v", "device": "cuda", "release": "0.5.17"}, "args": {}, "env": {},
    "secrets": [], "found": {},
}  # fmt: skip


def test_the_answer_is_the_filters(run):
    result, warned = run(**REQUEST)
    assert result["changed"] is False
    assert result["spec"]["argv"][-2:] == ["--port", "1"]
    assert warned == []


def test_a_warning_of_the_filter_is_shown(run):
    result, warned = run(**{**REQUEST, "engine": {**REQUEST["engine"], "release": "0.5.18"}})
    assert (
        warned
        == result["spec"]["warnings"]
        == ["SGLang 0.5.18 is not among the releases known here (0.5.17 to 0.5.17): treated as 0.5.17"]
    )


def test_a_refusal_is_one_sentence(run):
    with pytest.raises(AnsibleActionFail) as caught:
        run(**{**REQUEST, "profile": "q"})
    assert caught.value.message == "profile 'q' is not known: known: p"
