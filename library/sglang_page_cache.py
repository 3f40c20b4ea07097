#!/usr/bin/python
# Copyright: sglang-fleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Read a model into the page cache, so that the next start finds its weights in memory."""

from __future__ import annotations

DOCUMENTATION = r"""
module: sglang_page_cache
short_description: Read a model's files into the node's page cache
description:
  - Reads every file of O(folder) once. A server that loads the model soon after finds them in memory.
  - Does nothing where the files are larger than the memory that is available now, because they would push each other out.
options:
  folder:
    description: The model's folder on the node.
    type: path
    required: true
extends_documentation_fragment: [action_common_attributes]
attributes:
  check_mode:
    support: full
    details: Reads nothing.
  diff_mode: {support: none}
  platform: {support: full, platforms: linux}
author: [sglang-fleet contributors]
"""

EXAMPLES = r"""
- name: Read the model into the page cache
  sglang_page_cache:
    folder: /srv/models/Qwen3.6-27B
"""

RETURN = r"""
read_gb:
  description: What was read, in GB of 1e9 bytes.
  returned: always
  type: float
elapsed:
  description: Seconds that it took.
  returned: always
  type: float
skipped_because:
  description: Why nothing was read; empty when it was.
  returned: always
  type: str
"""

import os
import time

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.sglang_node import GB, host_memory

CHUNK = 16 << 20


def main():
    module = AnsibleModule(argument_spec={"folder": {"type": "path", "required": True}}, supports_check_mode=True)
    folder = module.params["folder"]
    started = time.monotonic()

    def leave(read, why=""):
        elapsed = round(time.monotonic() - started, 1)
        module.exit_json(changed=False, read_gb=round(read / GB, 2), elapsed=elapsed, skipped_because=why)

    if module.check_mode:
        leave(0, "check mode")
    try:
        files = [os.path.join(folder, name) for name in sorted(os.listdir(folder))]
        sizes = {path: os.path.getsize(path) for path in files if os.path.isfile(path)}
        available = host_memory()["available_gb"]
        if sum(sizes.values()) / GB > available:
            leave(0, f"{folder} has {sum(sizes.values()) / GB:.1f} GB and {available:.1f} GB of memory are available")
        read, buffer = 0, bytearray(CHUNK)
        for path in sizes:
            with open(path, "rb", buffering=0) as stream:
                while count := stream.readinto(buffer):
                    read += count
    except OSError as error:
        module.fail_json(msg=f"{error.filename or folder} can't be read into the page cache: {error.strerror or error}")
    leave(read)


if __name__ == "__main__":
    main()
