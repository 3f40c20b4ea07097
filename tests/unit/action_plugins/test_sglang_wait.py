# Copyright: sglang-fleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The action sglang_wait: slices, progress that people see, and a connection that comes and goes."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from ansible.errors import AnsibleConnectionFailure


class Time:
    """A clock that sleeping moves."""

    def __init__(self):
        self.now = 100.0

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


@pytest.fixture
def plugin(load, monkeypatch):
    """The plugin's module with a clock of its own; what it displays goes to `shown`."""
    module = load("action_plugins", "sglang_wait")
    module.shown = []
    monkeypatch.setattr(module, "time", Time())
    monkeypatch.setattr(module, "display", SimpleNamespace(display=module.shown.append))
    return module


def answer(stage, elapsed, state="starting", **more):
    return {
        "state": state,
        "stage": stage,
        "elapsed": elapsed,
        "children": [stage],
        "log": "/log",
        "timeline": [{"stage": stage, "at_s": elapsed - 5}],
        **more,
    }


@pytest.fixture
def run(plugin):
    """Run the action on a module that answers so, one answer (or failure) a call; the result and the module's arguments."""

    def _run(answers, check=False, **args):
        action = plugin.ActionModule.__new__(plugin.ActionModule)
        action._task = SimpleNamespace(args={"name": "n-gpu0", "root": "/r", **args}, check_mode=check, async_val=0)
        action._connection = SimpleNamespace(resets=0)
        action._connection.reset = lambda: setattr(action._connection, "resets", action._connection.resets + 1)
        asked, rest = [], iter(answers)

        def execute(module_name, module_args, task_vars):
            assert module_name == "sglang_wait"
            asked.append(module_args)
            told = next(rest)
            if isinstance(told, Exception):
                raise told
            return told

        action._execute_module = execute
        plugin.ActionBase.run = lambda self, tmp=None, task_vars=None: {}
        return action.run(None, {}), asked, action._connection.resets

    original = plugin.ActionBase.run
    yield _run
    plugin.ActionBase.run = original


def test_slices_go_on_until_it_is_ready(run, plugin):
    ready = answer("ready", 61.5, state="ready", outcome="ready")
    result, asked, _resets = run([answer("weights", 10.0), answer("weights", 20.0), ready], every=10)
    assert result is ready
    assert [args["slice"] for args in asked] == [10, 10, 10]
    assert [args.get("timeline", []) for args in asked] == [
        [],
        answer("weights", 10.0)["timeline"],
        answer("weights", 20.0)["timeline"],
    ]
    assert all(args["root"] == "/r" for args in asked)
    assert [args.get("children") for args in asked] == [None, ["weights"], ["weights"]]
    assert [args.get("boot") for args in asked] == [None, "/log", "/log"]
    assert plugin.shown == [
        "n-gpu0  +10s  weights: loading weights, for 5s",
        "n-gpu0  +20s  weights: loading weights, for 5s",
        "n-gpu0  +62s  ready",
    ]


def test_every_is_thirty_seconds_unless_told(run):
    assert run([answer("ready", 1.0, state="ready")])[1][0]["slice"] == 30
    assert run([answer("ready", 1.0, state="ready")], every="7")[1][0]["slice"] == 7


def test_a_server_that_was_ready_already_is_not_news(run, plugin):
    run([answer("ready", 900.0, state="ready", outcome="ready")])
    assert plugin.shown == []


def test_a_failure_is_returned_at_once(run, plugin):
    failed = {"failed": True, "msg": "n-gpu0 did not become ready"}
    result, asked, _resets = run([answer("weights", 5.0), failed])
    assert result is failed
    assert len(asked) == 2


def test_check_mode_asks_once(run, plugin):
    result, asked, _resets = run([answer("import", 0.0)], check=True)
    assert (result["state"], len(asked), plugin.shown) == ("starting", 1, [])


def test_a_cut_connection_is_tried_again(run, plugin):
    cut = AnsibleConnectionFailure("ssh: connection timed out")
    before = answer("weights", 5.0)
    result, asked, resets = run([before, cut, cut, answer("ready", 60.0, state="ready")])
    assert result["state"] == "ready"
    assert (len(asked), resets) == (4, 2)
    assert asked[3]["timeline"] == before["timeline"]
    assert plugin.shown[1] == "n-gpu0: connection lost, trying again (ssh: connection timed out)"


def test_a_connection_that_stays_away_is_given_up(run, plugin):
    def for_ever():
        while True:
            yield AnsibleConnectionFailure("no route to host")

    started = plugin.time.now
    with pytest.raises(AnsibleConnectionFailure, match="no route to host"):
        run(for_ever())
    assert plugin.RECONNECT_SECONDS <= plugin.time.now - started <= plugin.RECONNECT_SECONDS + 2 * plugin.RECONNECT_PAUSE


def test_a_connection_that_came_back_has_all_its_time_again(run, plugin):
    cut = [AnsibleConnectionFailure("gone")] * 50
    result, _asked, resets = run([*cut, answer("weights", 5.0), *cut, answer("ready", 9.0, state="ready")])
    assert (result["state"], resets) == ("ready", 100)


@pytest.mark.parametrize(
    ("told", "text"),
    [
        ({"stage": "weights", "elapsed": 12.4, "timeline": [{"at_s": 12.0}]}, "n  +12s  weights: loading weights"),
        (
            {"stage": "weights", "elapsed": 75.0, "timeline": [{"at_s": 0.0}, {"at_s": 12.0}]},
            "n  +75s  weights: loading weights, for 63s",
        ),
        (
            {"stage": "ready", "elapsed": 75.0, "timeline": [{"at_s": 70.0}], "waits_for": "connection refused"},
            "n  +75s  ready: connection refused, for 5s",
        ),
        ({"stage": "ready", "elapsed": 75.0, "timeline": [{"at_s": 70.0}], "outcome": "ready"}, "n  +75s  ready"),
    ],
)
def test_a_line_of_progress(plugin, told, text):
    assert plugin.progress("n", told) == text
