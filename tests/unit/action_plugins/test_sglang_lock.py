# Copyright: sglang-fleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The action sglang_lock: whose lock it is, and whether that one is alive."""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
from ansible.errors import AnsibleActionFail
from ansible.plugins.loader import module_utils_loader


@pytest.fixture
def plugin(load, root, monkeypatch):
    module_utils_loader.add_directory(str(root / "module_utils"))
    module = load("action_plugins", "sglang_lock")
    module.shown = []
    monkeypatch.setattr(module, "display", SimpleNamespace(display=module.shown.append))
    return module


@pytest.fixture
def run(plugin, monkeypatch):
    """Run the action on a module that answers so, one answer a call; the result and the module's arguments."""

    def _run(*answers, check=False, **args):
        action = plugin.ActionModule.__new__(plugin.ActionModule)
        action._task = SimpleNamespace(args={"root": "/r", "holder": {"run": "r1", "who": "alice"}, **args}, check_mode=check)
        asked, rest = [], iter(answers)

        def execute(module_name, module_args, task_vars):
            assert module_name == "sglang_lock"
            asked.append(module_args)
            return next(rest)

        action._execute_module = execute
        monkeypatch.setattr(plugin.ActionBase, "run", lambda self, tmp=None, task_vars=None: {})
        return action.run(None, {}), asked

    return _run


def held(holder):
    return {"failed": True, "cause": "held", "holder": {"run": "r0", "who": "bob", "since": "noon", "until": "one", **holder}}


TAKEN = {"holder": {"run": "r1"}, "taken_over": {"run": "r0", "who": "bob", "since": "noon"}}


def test_the_holder_is_the_playbook_that_runs_this(run, plugin):
    result, (asked,) = run({"holder": {"run": "r1"}, "taken_over": None})
    assert result["holder"] == {"run": "r1"}
    holder = asked["holder"]
    assert (holder["run"], holder["who"], holder["pid"]) == ("r1", "alice", os.getppid())
    assert {"controller", "boot_id", "pid_namespace", "start_ticks"} <= set(holder)
    assert not plugin.dead(holder), "the parent of this test lives"


def test_a_holder_of_this_machine_that_is_gone_is_put_aside_and_told(run, plugin):
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    holder = {**plugin.ourselves(), **plugin._process().identity(child.pid)}
    assert not plugin.dead(holder)
    child.kill()
    child.wait(10)
    assert plugin.dead(holder)
    for ticks in (None, "1"):
        assert not plugin.dead({**holder, "start_ticks": ticks}), "what is not known to be gone is believed"
    result, asked = run(held(holder), TAKEN)
    assert result is TAKEN and [args.get("take_over") for args in asked] == [None, "r0"]
    assert plugin.shown == ["the lock of the fleet was bob's since noon, whose run is over: taken over"]
    plugin.shown.clear()
    run(held(holder), TAKEN, name="sglang_gpu0.compare")
    assert plugin.shown == ["the lock sglang_gpu0.compare was bob's since noon, whose run is over: taken over"]
    plugin.shown.clear()
    run(held(holder), TAKEN, check=True)
    assert plugin.shown == [], "who only looks takes nothing over"


def test_a_holder_says_what_it_holds_it_for(run):
    with pytest.raises(AnsibleActionFail, match="bob compares profiles on n-gpu0 since noon .*, so nothing was touched: "):
        run(held({"pid": 1, "controller": "desk", "doing": "compares profiles on n-gpu0"}))


@pytest.mark.parametrize("elsewhere", [{"boot_id": "another"}, {"pid_namespace": "pid:[1]"}])
def test_a_holder_elsewhere_is_believed_and_refused_in_one_sentence(run, plugin, elsewhere):
    holder = {**plugin.ourselves(), "pid": 1, "start_ticks": 1, "controller": "desk", **elsewhere}
    with pytest.raises(AnsibleActionFail) as refused:
        run(held(holder))
    text = str(refused.value)
    assert text.startswith("bob swaps this fleet since noon (pid 1 on desk), so nothing was touched: ")
    assert "free at once for who comes from there, and for others at one, and -e take_over=true does not wait" in text


def test_a_holder_that_runs_here_holds_no_longer_than_it_runs(run, plugin):
    with pytest.raises(AnsibleActionFail) as refused:
        run(held(plugin.ourselves()))
    assert "wait for it; its lock is free as soon as that process is gone, and -e take_over=true" in str(refused.value)


def test_another_failure_is_passed_on(run):
    answer = {"failed": True, "msg": "the disk is full"}
    assert run(answer)[0] is answer
