# Copyright: sglang-fleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Checks what was typed behind -e and --limit before anything else looks at it."""

from __future__ import annotations

import difflib
import getpass
import os
import re
import socket
import time
from pathlib import Path

from ansible import context
from ansible.errors import AnsibleActionFail
from ansible.module_utils.common.arg_spec import ArgumentSpecValidator
from ansible.plugins.action import ActionBase
from ansible.utils.vars import load_extra_vars

PROJECT = Path(__file__).resolve().parents[1]
TYPES = {
    "bool": "true or false",
    "float": "a number",
    "str": "text",
    "path": "a path",
    "list": "a list",
    "dict": "a mapping",
}

# Words for an option that are not spelled like it.
MEANT = {"output": "out"}

# Kinds of option that Ansible has no type for: how it reads them, the least, and how people are told.
KINDS = {
    "int": ({"type": "int"}, 1, "a whole number above 0"),
    "count": ({"type": "int"}, 0, "a whole number from 0 on"),
    "counts": ({"type": "list", "elements": "int"}, 0, "whole numbers from 0 on, as in 150,20"),
    "amount": ({"type": "float"}, 0, "a number from 0 on"),
}


class ActionModule(ActionBase):
    """See ``ansible-doc sglang_options``."""

    _supports_check_mode = True
    _requires_connection = False

    def run(self, tmp=None, task_vars=None):
        result = super().run(tmp, task_vars)
        options = self._task.args.get("options") or {}
        given = load_extra_vars(self._loader)
        self._refuse_misspelled(given, options)
        self._refuse_wrong_type(given, options)
        self._refuse_blank_limit()
        self._refuse_empty_selection(task_vars)
        user = getpass.getuser()
        # Of the ansible-playbook itself: two of one user may begin in the same second.
        run = f"{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}-{user}-{os.getppid()}"
        result.update(changed=False, who=f"{user}@{socket.gethostname()}", run=run)
        return result

    def _refuse_misspelled(self, given, options):
        for name in given:
            near = difflib.get_close_matches(name, options, n=1, cutoff=0.75)
            if not near and MEANT.get(name) in options and not any(option.startswith(name) for option in options):
                near = [MEANT[name]]
            if name not in options and near and name not in self._variables():
                raise AnsibleActionFail(f"-e {name} is not an option of this playbook: did you mean '{near[0]}'?")

    def _variables(self):
        """Names of the project's own variables: one that is near an option's name is no misspelling."""
        files = [*PROJECT.glob("group_vars/all/*.yml"), *PROJECT.glob("roles/*/defaults/main.yml")]
        return {name for path in files for name in self._loader.load_from_file(str(path)) or {}}

    def _refuse_wrong_type(self, given, options):
        for name, kind in options.items():
            if name not in given:
                continue
            if isinstance(kind, dict):
                self._refuse_unknown_keys(name, given[name], kind)
                for key, value in given[name].items():
                    self._refuse_value(f"{name} has {key}:", value, kind[key])
            else:
                self._refuse_value(f"{name} is", given[name], kind)

    @staticmethod
    def _refuse_unknown_keys(name, value, kinds):
        if not isinstance(value, dict):
            raise AnsibleActionFail(f"-e {name} is {value!r}: expected a mapping of {', '.join(kinds)}")
        unknown = [key for key in value if key not in kinds]
        if unknown:
            raise AnsibleActionFail(f"-e {name} has an unknown key {unknown[0]!r}: known are {', '.join(kinds)}")

    def _refuse_value(self, subject, value, kind):
        if isinstance(kind, list):
            if value not in kind:
                raise AnsibleActionFail(f"-e {subject} {value!r}: expected {' or '.join(kind)}")
            return
        spec, least, told = KINDS.get(kind) or ({"type": kind}, None, TYPES.get(kind))
        read = ArgumentSpecValidator({"value": spec}).validate({"value": value})
        blank = value is None or value == ""
        if (
            read.error_messages
            or blank
            or (least is not None and not self._at_least(least, read.validated_parameters["value"]))
        ):
            raise AnsibleActionFail(f"-e {subject} {value!r}: expected {told}")
        if least is not None and isinstance(value, bool):
            raise AnsibleActionFail(f"-e {subject} {value!r}: expected {told}")

    @staticmethod
    def _at_least(least, value):
        return all(least <= number < float("inf") for number in (value if isinstance(value, list) else [value]))

    def _refuse_blank_limit(self):
        # Ansible takes it for no limit at all: `--limit "$UNSET"` would be the whole fleet.
        limit = context.CLIARGS.get("subset")
        if limit is not None and not str(limit).strip():
            raise AnsibleActionFail("--limit is empty: name servers, or leave it out for the whole fleet")

    def _refuse_empty_selection(self, task_vars):
        groups = task_vars["groups"]
        servers = groups.get("sglang_servers", [])
        if not servers:
            raise AnsibleActionFail(
                "the inventory has no server (group sglang_servers is empty):"
                " give one with -i, such as -i inventory/four_gpus.yml, and see its first lines for the form"
            )
        grouped = {host for group, hosts in groups.items() if group.startswith("node_") for host in hosts}
        foreign = [server for server in servers if server not in grouped]
        if foreign:
            raise AnsibleActionFail(
                f"{foreign[0]} is in the group sglang_servers and in no group of a node: make the inventory with the plugin"
                " sglang_fleet (its first line is `plugin: sglang_fleet`; ansible-doc -t inventory sglang_fleet)"
            )
        chosen = set(task_vars["ansible_play_hosts_all"]) | set(task_vars.get("ansible_play_batch", []))
        if not chosen.intersection(servers) and chosen != {"localhost"}:
            of_node = [
                f"node_{re.sub('[^A-Za-z0-9_]', '_', node)}" for node in groups.get("sglang_nodes", []) if node in chosen
            ]
            hint = (
                f"did you mean {of_node[0]}, all servers of that node?" if of_node else f"servers are {', '.join(servers[:8])}"
            )
            raise AnsibleActionFail(f"--limit selects no server: {hint}")
