# Copyright: sglang-fleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The filter sglang_router_spec as a task: what it refuses reads as one sentence, not as a templating error."""

from __future__ import annotations

from ansible.errors import AnsibleActionFail, AnsibleError
from ansible.plugins.action import ActionBase
from ansible.plugins.loader import filter_loader


class ActionModule(ActionBase):
    """See ``ansible-doc sglang_router_spec``."""

    _supports_check_mode = True
    _requires_connection = False

    def run(self, tmp=None, task_vars=None):
        result = super().run(tmp, task_vars)
        try:
            spec = filter_loader.get("sglang_router_spec").j2_function(self._task.args)
        except AnsibleError as error:
            raise AnsibleActionFail(error.message) from None
        result.update(changed=False, spec=spec)
        return result
