#!/usr/bin/python
# Copyright: sglang-fleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Documentation of the action sglang_compare, which runs on the controller (action_plugins/sglang_compare.py)."""

from __future__ import annotations

DOCUMENTATION = r"""
module: sglang_compare
short_description: What comparing profiles needs on the controller
description:
  - V(workloads) works out what is sent and refuses what can't be measured. V(todo) tells what of it is not measured yet on one
    server, in turns A B C A B C, and what is to be put back. V(keep) writes one record. V(report) makes the comparisons of
    the records, and the page where C(matplotlib) is there.
  - Records are C(compare/SERVER/TIME.json) below the folder. None is ever changed or overwritten. One that can't be read is a
    warning.
  - It runs on the controller and changes no server. What is refused fails the task with one sentence.
options:
  do:
    description: Which step.
    type: str
    required: true
    choices: [workloads, todo, keep, report]
  sweep: {description: "For V(workloads), V(short), V(long) or V(both).", type: str}
  shapes: {description: "For V(workloads), C(input_tokens) and C(output_tokens) by shape.", type: dict}
  concurrencies: {description: "For V(workloads) and V(todo), requests in flight, a cell each.", type: list, elements: int}
  repeats: {description: "For V(workloads) and V(todo), how often each profile is measured.", type: int}
  profiles:
    description: Names of the profiles, for V(workloads), and for V(report) where not all of the series are wanted.
    type: list
    elements: str
  known: {description: "For V(workloads), names of all profiles.", type: list, elements: str}
  prompts_per_concurrency: {description: "For V(workloads), requests of a run as a multiple of its concurrency.", type: int}
  min_prompts: {description: "For V(workloads), the least number of requests of a run.", type: int}
  prompts: {description: "For V(workloads), a file of prompts as M(sglang_benchmark) reads them.", type: path}
  called_from: {description: "For V(workloads), the folder that O(prompts) is relative to.", type: path}
  folder: {description: "For V(todo) and V(keep), the folder of the records.", type: path}
  server: {description: "For V(todo), name of the server.", type: str}
  launches: {description: "For V(todo), C(launch_sha256) of M(sglang_server) by profile, in their order.", type: dict}
  workloads: {description: "For V(todo), what V(workloads) returned.", type: list, elements: dict}
  release: {description: "For V(todo), release of the engine.", type: str}
  model: {description: "For V(todo), name of the model.", type: str}
  gpus: {description: "For V(todo), names of the server's GPUs.", type: list, elements: str}
  runs_now: {description: "For V(todo), the server's entry of M(sglang_server_info).", type: dict}
  fresh: {description: "For V(todo), begin a new series.", type: bool}
  record: {description: "For V(keep), the record, with at least C(kind) and C(server).", type: dict}
  folders: {description: "For V(report), folders of records.", type: list, elements: path}
  servers: {description: "For V(report), names of the servers.", type: list, elements: str}
  out: {description: "For V(report), where the page is written.", type: path}
  required: {description: "For V(report), fail when there is nothing to report or no page can be made.", type: bool}
extends_documentation_fragment: [action_common_attributes, action_common_attributes.conn, action_common_attributes.flow]
attributes:
  action: {support: full}
  async: {support: none}
  become: {support: none}
  bypass_host_loop: {support: none}
  check_mode: {support: full}
  connection: {support: none}
  delegation: {support: none}
  diff_mode: {support: none}
  platform: {support: full, platforms: all}
seealso:
  - plugin: sglang_comparisons
    plugin_type: filter
  - plugin: sglang_compare_page
    plugin_type: filter
author: [sglang-fleet contributors]
"""

EXAMPLES = r"""
- name: Make the report
  sglang_compare:
    do: report
    folders: [artifacts]
    servers: [node1-gpu0]
    out: artifacts/compare/report.html
  register: report

- name: Tell what was measured
  ansible.builtin.debug:
    msg: "{{ report['text'] }}"
"""

RETURN = r"""
workloads:
  description: What is sent, each with an C(id) that is the same for the same load.
  returned: for V(workloads)
  type: list
  elements: dict
concurrencies:
  description: Requests in flight, as a list of numbers.
  returned: for V(workloads)
  type: list
  elements: int
prompts:
  description: Full path of the file of prompts, empty without one.
  returned: for V(workloads)
  type: str
series:
  description: The series that is gone on with or begun, named by the time of its beginning.
  returned: for V(todo)
  type: str
turns:
  description: Turns that are left, each with C(profile), C(repeat) and C(todo) (C(workload) and missing C(concurrencies)).
  returned: for V(todo)
  type: list
  elements: dict
measured_already:
  description: How many of the cells that are asked for are measured.
  returned: for V(todo)
  type: int
before:
  description:
    - What ran before and is to be put back, as M(sglang_server_info) tells it, and C(of), the time of the run that left it
      to do, or null.
  returned: for V(todo)
  type: dict
record:
  description: The record as it was written.
  returned: for V(keep)
  type: dict
path:
  description: Its file.
  returned: for V(keep)
  type: str
comparisons:
  description: Result of filter P(sglang_comparisons#filter).
  returned: for V(report)
  type: list
  elements: dict
text:
  description: The same as tables (P(sglang_compare_report#filter)).
  returned: for V(report)
  type: str
page:
  description: Path of the page, or null.
  returned: for V(report)
  type: str
"""

from ansible.module_utils.basic import AnsibleModule

OPTIONS = (
    "do", "sweep", "shapes", "concurrencies", "repeats", "profiles", "known", "prompts_per_concurrency",
    "min_prompts", "prompts", "called_from", "folder", "server", "launches", "workloads", "release", "model",
    "gpus", "runs_now", "fresh", "record", "folders", "servers", "out", "required",
)  # fmt: skip


def main():
    # Nothing is checked here: whatever comes in, one sentence is the answer.
    module = AnsibleModule(argument_spec={name: {"type": "raw"} for name in OPTIONS}, supports_check_mode=True)
    module.fail_json(
        msg="sglang_compare ran as a module: expected its action plugin; set action_plugins in ansible.cfg to this project's"
        " folder action_plugins"
    )


if __name__ == "__main__":
    main()
