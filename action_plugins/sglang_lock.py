# Copyright: sglang-fleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Runs the module sglang_lock as this very ansible-playbook, and tells whether the one that holds the lock is alive."""

from __future__ import annotations

import importlib.util
import os
import socket

from ansible.errors import AnsibleActionFail
from ansible.plugins.action import ActionBase
from ansible.plugins.loader import module_utils_loader
from ansible.utils.display import Display

display = Display()


def _process():
    """The project's own sglang_process: Ansible takes module_utils to nodes and does not import them here."""
    spec = importlib.util.spec_from_file_location("sglang_process", module_utils_loader.find_plugin("sglang_process"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class ActionModule(ActionBase):
    """See ``ansible-doc sglang_lock``. O(holder) is ours to fill: only ``run`` and ``who`` are taken from the task."""

    _supports_check_mode = True

    def run(self, tmp=None, task_vars=None):
        super().run(tmp, task_vars)
        given = dict(self._task.args)
        arguments = {**given, "holder": {**ourselves(), **(given.get("holder") or {})}}
        answer = self._lock(arguments, task_vars)
        holder = answer.get("holder") or {}
        if answer.get("failed") and answer.get("cause") == "held" and dead(holder):
            answer = self._lock({**arguments, "take_over": holder["run"]}, task_vars)
        if answer.get("failed") and answer.get("cause") == "held":
            raise AnsibleActionFail(refusal(answer["holder"]), result=answer)
        if answer.get("taken_over") and not self._task.check_mode:
            gone = answer["taken_over"]
            told = "the lock of the fleet" if given.get("name", "swap") == "swap" else f"the lock {given['name']}"
            display.display(f"{told} was {gone['who']}'s since {gone['since']}, whose run is over: taken over")
        return answer

    def _lock(self, arguments, task_vars):
        return self._execute_module(module_name="sglang_lock", module_args=arguments, task_vars=task_vars)


def ourselves():
    """The ansible-playbook that runs this task: a worker's parent, known by more than its pid where there is a /proc."""
    told = {"controller": socket.gethostname(), "pid": os.getppid()}
    try:
        namespace = os.readlink("/proc/self/ns/pid")
        known = _process().identity(os.getppid())
    except OSError:
        return told
    return {**told, "boot_id": known["boot_id"], "pid_namespace": namespace, "start_ticks": known["start_ticks"]}


def seen(holder):
    """Is the holder a process of the machine, and the namespace, that this controller runs in?"""
    us = ourselves()
    told = bool(us.get("boot_id")) and isinstance(holder.get("start_ticks"), int)
    return told and all(holder.get(key) == us[key] for key in ("boot_id", "pid_namespace"))


def dead(holder):
    """Was the holder a process that this controller can see, and is it gone? A holder elsewhere is not known to be dead."""
    return seen(holder) and _process().alive({key: holder[key] for key in ("pid", "start_ticks", "boot_id")}) is None


def refusal(holder):
    """Who holds it, since when, and what to do, in one sentence."""
    free = (
        "its lock is free as soon as that process is gone"
        if seen(holder)
        else f"if that run is dead, its lock is free at once for who comes from there, and for others at {holder['until']}"
    )
    return (
        f"{holder['who']} {holder.get('doing') or 'swaps this fleet'} since {holder['since']}"
        f" (pid {holder.get('pid')} on {holder.get('controller')}), so nothing was touched: wait for it;"
        f" {free}, and -e take_over=true does not wait"
    )
