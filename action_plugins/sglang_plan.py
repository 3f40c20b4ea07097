# Copyright: sglang-fleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The filter sglang_fleet_plan as a task, with the records of earlier boots, and what to do when a plan does not fit."""

from __future__ import annotations

import json
from pathlib import Path

from ansible.errors import AnsibleActionFail, AnsibleError
from ansible.plugins.action import ActionBase
from ansible.plugins.loader import filter_loader
from ansible.utils.display import Display

SCHEMA = 1  # of filter sglang_boot_record
WHEN_NOT = ("refuse", "warn", "tell")

display = Display()


class ActionModule(ActionBase):
    """See ``ansible-doc sglang_plan``."""

    _supports_check_mode = True
    _requires_connection = False

    def run(self, tmp=None, task_vars=None):
        result = super().run(tmp, task_vars)
        arguments = dict(self._task.args)
        folder, when_not = arguments.pop("records", None), arguments.pop("when_not", "refuse")
        if when_not not in WHEN_NOT:
            raise AnsibleActionFail(f"-e plan is {when_not!r}: expected {', '.join(WHEN_NOT[:2])}")
        servers = arguments.pop("servers", [])
        wanted = {name: value for name, value in arguments.items() if value is not None}
        try:
            request = filter_loader.get("sglang_plan_request").j2_function
            # A CPU's KV cache is bounded by max-total-tokens, and its memory is the host's: nothing to plan.
            planned, refused = [], {}
            for server in servers:
                try:
                    if not server["spec"]:
                        raise AnsibleError(f"{server['name']}: {server.get('refused') or 'nothing tells how it is started'}")
                    if server["spec"]["device"] == "cuda":
                        planned.append(request(server))
                except AnsibleError as error:
                    if when_not != "tell":
                        raise
                    refused[server["name"]] = error.message
            plan = filter_loader.get("sglang_fleet_plan").j2_function(
                planned, records=_records(folder), tolerant=True, **wanted
            )
            plan["unplanned"] = {**refused, **plan["unplanned"]}
            report = filter_loader.get("sglang_plan_report").j2_function(plan)
        except AnsibleError as error:
            raise AnsibleActionFail(error.message) from None
        result.update(changed=False, plan=plan, report=report)
        for reason in plan["unplanned"].values() if when_not != "tell" else ():
            display.warning(f"started without a plan: {reason}")
        if not plan["fits"] and when_not == "refuse":
            raise AnsibleActionFail(
                "the plan does not fit, nothing was touched: "
                + "; ".join(plan["reasons"])
                + "; -e plan=warn goes on all the same"
            )
        if not plan["fits"] and when_not == "warn":
            for reason in plan["reasons"]:
                display.warning(f"the plan does not fit: {reason}")
        return result


def _records(folder):
    """Records of earlier boots. One that can't be read, or has another form, is no record."""
    found = []
    for path in sorted(Path(folder).glob("boots/*/*.json")) if folder else []:
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        if isinstance(record, dict) and record.get("schema") == SCHEMA:
            found.append(record)
    return found
