# Copyright: sglang-fleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What Ansible does with a batch that fails: the facts that role sglang_swap is written around. No server is started.

A test that fails here with a newer ansible-core says which part of the role can be simpler.
"""

from __future__ import annotations

import sys

import pytest
import yaml
from helpers.runner import run_playbook

HOSTS = ("a", "b", "c", "d")
GONE = {"ansible_connection": "ssh", "ansible_host": "127.0.0.1", "ansible_port": 1, "ansible_ssh_retries": 0}
FAIL = {"name": "Fail", "ansible.builtin.fail": {"msg": "on purpose"}, "when": "inventory_hostname == 'a'"}


def debug(name, **more):
    return {"name": name, "ansible.builtin.debug": {"msg": name}, **more}


@pytest.fixture
def run(tmp_path):
    """Run plays in batches of two; which hosts each task was done for."""

    def _run(*plays, gone=()):
        hosts = {host: {"ansible_connection": "local", "ansible_python_interpreter": sys.executable} for host in HOSTS}
        hosts.update({host: GONE for host in gone})
        book = [{"hosts": "all", "gather_facts": False, **play} for play in plays]
        (tmp_path / "ansible.cfg").write_text("[defaults]\n")
        (tmp_path / "book.yml").write_text(yaml.safe_dump(book, sort_keys=False))
        result = run_playbook(tmp_path, "book.yml", {"all": {"hosts": hosts}})
        done = {
            task: sorted(host for host, outcome in outcomes.items() if outcome == "ok")
            for task, outcomes in result.outcomes.items()
        }
        return result, done

    return _run


@pytest.mark.parametrize("always", [False, True], ids=["without_always", "with_always"])
def test_a_failure_inside_rescue_is_missed_by_max_fail_percentage_where_the_block_has_an_always(run, always):
    again = {"name": "Fail again", "ansible.builtin.fail": {"msg": "on purpose"}}
    block = {"block": [FAIL, debug("Work")], "rescue": [debug("Put back"), again]}
    block |= {"always": [debug("Clean up")]} if always else {}
    result, done = run({"serial": 2, "max_fail_percentage": 0, "tasks": [block]})
    assert result.rc != 0
    assert done["Put back"] == ["a"], "healthy mates are let alone"
    assert done["Work"] == (["b", "c", "d"] if always else ["b"]), "the next batch"


def test_any_errors_fatal_puts_back_healthy_mates(run):
    block = {"block": [FAIL, debug("Work")], "rescue": [debug("Put back")]}
    result, done = run({"serial": 2, "any_errors_fatal": True, "tasks": [block]})
    assert done["Put back"] == ["a", "b"]


def test_a_batch_of_which_all_failed_ends_the_playbook_before_any_summary(run):
    _result, done = run({"serial": 1, "tasks": [FAIL, debug("Work")]}, {"tasks": [debug("Sum up")]})
    assert done.get("Work", []) == [] and "Sum up" not in done


def test_a_fact_and_end_play_end_the_roll_and_let_the_summary_run(run):
    earlier = "ansible_play_hosts_all[:ansible_play_hosts_all.index(ansible_play_batch[0])]"
    end = {
        "name": "End the roll",
        "ansible.builtin.meta": "end_play",
        "when": f"{earlier} | map('extract', hostvars, 'failed_here') | select('defined') | list | length > 0",
    }
    note = {"name": "Note", "ansible.builtin.set_fact": {"failed_here": True}}
    block = {"block": [FAIL, debug("Work")], "rescue": [note]}
    play = {"serial": 2, "max_fail_percentage": 0, "ignore_unreachable": True, "tasks": [end, block, debug("After")]}
    result, done = run(play, {"tasks": [debug("Sum up")]})
    assert (done["Work"], done["After"]) == (["b"], ["a", "b"]), "a mate finishes its own work, and no other batch is begun"
    assert done["Sum up"] == list(HOSTS) and result.rc == 0, "so the summary has to fail"


@pytest.mark.parametrize(("ignore_errors", "goes_on"), [(False, False), (True, True)])
def test_run_once_makes_an_ignored_unreachable_host_fatal_unless_errors_are_ignored(run, ignore_errors, goes_on):
    ask = {
        "name": "Ask", "ansible.builtin.ping": {}, "delegate_to": "{{ item }}", "loop": ["b", "c"], "run_once": True,
        "ignore_unreachable": True, "ignore_errors": ignore_errors, "register": "asked",
    }  # fmt: skip
    _result, done = run({"tasks": [ask, debug("Work")]}, gone=["c"])
    assert ("Work" in done) is goes_on
