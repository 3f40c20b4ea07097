#!/usr/bin/python
# Copyright: sglang-fleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What a node has, in one call."""

from __future__ import annotations

DOCUMENTATION = r"""
module: sglang_node_info
short_description: What a node has for SGLang, GPUs, host memory, engine and models
description:
  - Reads, in one call a node, the GPUs with UUID and memory, the host's memory and cgroup limit, the SGLang engine, and
    the model folders. Changes nothing.
  - GPUs come from nvidia-ml-py where this Python has it (SGLang brings it), else from C(nvidia-smi), else there are none.
options:
  models:
    description: Model folders to look into.
    type: list
    elements: path
    default: []
extends_documentation_fragment: [action_common_attributes]
attributes:
  check_mode: {support: full}
  diff_mode: {support: none}
  platform: {support: full, platforms: linux}
notes:
  - The engine told of is the one that runs the module. Set C(ansible_python_interpreter) to the engine's python.
author: [sglang-fleet contributors]
"""

EXAMPLES = r"""
- name: Read the node
  sglang_node_info:
    models: [/srv/models/Qwen3.6-27B]
  vars:
    ansible_python_interpreter: /opt/sglang/venv/bin/python
"""

RETURN = r"""
gpus:
  description:
    - GPUs by C(index) with C(uuid), C(name), C(total_gib), C(free_gib) and C(processes) (C(pid), C(used_gib)).
  returned: always
  type: list
  elements: dict
driver:
  description: Release of the NVIDIA driver, null without one.
  returned: always
  type: str
host_memory:
  description: C(total_gb), C(available_gb) and C(cgroup_limit_gb) (null without a limit), in GB of 1e9 bytes.
  returned: always
  type: dict
engine:
  description: C(python), C(python_version), and the versions of C(release) (SGLang), C(torch) and C(requests), or null.
  returned: always
  type: dict
models:
  description:
    - By folder, C(config) (its config.json), C(weight_bytes) without those of the model's own draft head, C(draft_bytes) of
      that head, C(weight_source) (V(index) or V(files)) and C(problem), one sentence when the model can't be loaded, else
      null.
  returned: always
  type: dict
boot_id:
  description: Changes with every boot of the node.
  returned: always
  type: str
"""

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.sglang_node import driver, engine, gpus, host_memory, model
from ansible.module_utils.sglang_process import boot_id


def main():
    module = AnsibleModule(
        argument_spec={"models": {"type": "list", "elements": "path", "default": []}}, supports_check_mode=True
    )
    module.exit_json(
        changed=False,
        gpus=gpus(),
        driver=driver(),
        host_memory=host_memory(),
        engine=engine(),
        models={folder: model(folder) for folder in dict.fromkeys(module.params["models"])},
        boot_id=boot_id(),
    )


if __name__ == "__main__":
    main()
