# Copyright: sglang-fleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Keeps what boots showed, on the controller. It changes no server, and its failure is a warning: they serve all the same."""

from __future__ import annotations

import json
import re
from pathlib import Path

from ansible.errors import AnsibleActionFail, AnsibleError
from ansible.plugins.action import ActionBase
from ansible.plugins.loader import filter_loader
from ansible.utils.display import Display

display = Display()


class ActionModule(ActionBase):
    """See ``ansible-doc sglang_record``."""

    _supports_check_mode = False
    _requires_connection = False

    def run(self, tmp=None, task_vars=None):
        result = super().run(tmp, task_vars)
        arguments = self._task.args
        plans = (arguments.get("plan") or {}).get("servers") or {}
        ready = [server for server in arguments["servers"] if server["ready"].get("state") == "ready"]
        try:
            record = filter_loader.get("sglang_boot_record").j2_function
            records = [record(server, plans.get(server["name"])) for server in ready]
            report = filter_loader.get("sglang_boots_report").j2_function(records)
        except AnsibleError as error:
            raise AnsibleActionFail(error.message) from None
        for server, boot in zip(ready, records):
            if server["started"]:
                _keep(Path(arguments["folder"]) / "boots" / server["name"], boot)
        result.update(changed=False, records=records, report=report)
        return result


def _keep(folder, boot):
    """Write one record, under the time of the launch. An existing one is never overwritten."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        stamp = re.sub("[-:]", "", str(boot["launched_at"]))
        with (folder / f"{stamp}.json").open("x", encoding="utf-8") as stream:
            stream.write(json.dumps(boot, indent=2) + "\n")
    except FileExistsError:
        pass  # kept by an earlier run of the same boot
    except OSError as error:
        display.warning(f"{boot['server']}: the record of its boot was not kept: {folder}: {error.strerror}")
