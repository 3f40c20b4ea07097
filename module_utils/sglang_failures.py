# Copyright: sglang-fleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Why a start fails: one entry a cause. Add yours here.

Each entry is data:

``id``       a short name, stable: records and tests refer to it
``pattern``  a regular expression, searched in each line of the log; its named groups fill the two texts
``cause``    what happened, in one sentence
``advice``   what to do about it

The log is walked from the top and the first line that matches wins: what follows it in a log is aftermath. The entries
of ``AFTERMATH`` say only that some process died. They are what is reported when nothing specific was logged.
"""

from __future__ import annotations

import re

SPECIFIC = [
    {
        "id": "unknown_flag",
        "pattern": r"error: unrecognized arguments: (?P<what>.+)",
        "cause": "this SGLang does not know {what}",
        "advice": "take the flag out of the profile, or spell it for this release in group_vars/all/releases.yml",
    },
    {
        "id": "bad_choice",
        "pattern": r"error: argument (?P<flag>\S+): (?P<what>.+)",
        "cause": "flag {flag}: {what}",
        "advice": "give the flag a value that this release takes",
    },
    {
        "id": "bad_model_path",
        "pattern": r"OSError: (?:Repo id must be in the form .*?: '(?P<what>[^']+)'"
        r"|(?P<other>\S+) is not a local folder)",
        "cause": "there is no model folder {what}{other}",
        "advice": "correct the model's path in group_vars/all/models.yml, or put the model there",
    },
    {
        "id": "no_config",
        "pattern": r"ValueError: Unrecognized model in (?P<what>\S+?)\.? Should have a `model_type` key",
        "cause": "{what} holds no config.json that names a model type",
        "advice": "complete the model folder",
    },
    {
        "id": "context_too_long",
        "pattern": r"User-specified context_length \((?P<asked>\d+)\) is greater than the derived context_length"
        r" \((?P<has>\d+)\)",
        "cause": "context-length {asked} is more than the model's {has}",
        "advice": "set context-length to at most {has}",
    },
    {
        "id": "no_weights",
        "pattern": r"Cannot find any model weights with `(?P<what>[^`]+)`",
        "cause": "the model folder {what} holds no weights",
        "advice": "copy the weights there",
    },
    {
        "id": "missing_shard",
        "pattern": r"FileNotFoundError: .*?(?P<what>[^ '\"]*model-\d+-of-\d+\.safetensors)",
        "cause": "the weight file {what} is missing",
        "advice": "copy it; in a linked cache, check that the link's target is there too",
    },
    {
        "id": "no_kv_memory",
        "pattern": r"Loaded weights leave no GPU memory for the KV cache under --mem-fraction-static=(?P<has>[\d.]+)\. Raise"
        r" --mem-fraction-static above (?P<least>[\d.]+?)\.?(?: |$)",
        "cause": "the weights leave no memory for the KV cache at mem-fraction-static {has}",
        "advice": "raise mem-fraction-static above {least}",
    },
    {
        "id": "no_kv_memory",
        "pattern": r"Loaded weights leave no GPU memory for the KV cache"
        r"|Not enough memory\. Please try to increase --mem-fraction-static",
        "cause": "the weights leave no memory for the KV cache",
        "advice": "raise mem-fraction-static, or use more GPUs or a smaller checkpoint",
    },
    {
        "id": "no_state_memory",
        "pattern": r"Not enough GPU memory for hybrid .*?total_rest_memory=(?P<rest>-?[\d.]+) GB",
        "cause": "the weights leave no memory for the hybrid model's state cache ({rest} GiB)",
        "advice": "raise mem-fraction-static: it is a share of the memory that is free at the start",
    },
    {
        "id": "no_host_memory",
        "pattern": r"Not enough host memory available\. Requesting (?P<asked>[\d.]+) GB but only have (?P<has>[\d.]+) GB free",
        "cause": "the host cache asks for {asked} GB and the node has {has} GB free",
        "advice": "lower hicache-size: it is per GPU and 10 GB of the node stay free",
    },
    {
        "id": "port_in_use",
        "pattern": r"error while attempting to bind on address \('(?P<host>[^']+)', (?P<port>\d+)\): address already in use",
        "cause": "port {port} was taken by another process during the start",
        "advice": "free the port, or give the server another one in the inventory",
    },
    {
        "id": "internal_port_in_use",
        "pattern": r"ZMQError: Address already in use(?: \(addr='(?P<what>[^']+)'\))?",
        "cause": "a port that SGLang uses between its processes is taken ({what})",
        "advice": "keep the servers' ports further apart in the inventory",
    },
    {
        "id": "graph_capture_memory",
        "pattern": r"Capture (?:cuda|CUDA) graph failed",
        "cause": "the GPU's memory did not last for the CUDA graphs",
        "advice": "lower mem-fraction-static, or cuda-graph-max-bs to the requests that run",
    },
    {
        "id": "gpu_memory",
        "pattern": r"CUDA out of memory\. Tried to allocate (?P<what>[\d.]+ \w+)",
        "cause": "the GPU had no {what} left",
        "advice": "free the GPU of other processes, or lower mem-fraction-static",
    },
    {
        "id": "state_strategy",
        "pattern": r"no_buffer do not support overlap schedule"
        r"|is not compatible with radix cache when using --mamba-\S+ no_buffer",
        "cause": "the state-cache strategy no_buffer does not go with these flags",
        "advice": "set mamba-radix-cache-strategy to extra_buffer",
    },
    {
        "id": "needs_gpu",
        "pattern": r"(?P<what>extra_buffer requires platform support|Torch not compiled with CUDA enabled"
        r"|is not supported in decode attention backend torch_native)",
        "cause": "this profile needs a GPU ({what})",
        "advice": "use a profile that runs on this device",
    },
    {
        "id": "exclusive_flags",
        "pattern": r"(?P<what>\S+ and \S+ are mutually exclusive)",
        "cause": "{what}",
        "advice": "keep one of the two flags",
    },
    {
        "id": "disk_full",
        "pattern": r"No space left on device",
        "cause": "a disk of the node is full",
        "advice": "free space below the fleet's folder, /tmp and /dev/shm",
    },
    {
        "id": "watchdog",
        "pattern": r"Scheduler watchdog timeout \(watchdog_timeout=(?P<what>[\d.]+)",
        "cause": "the scheduler did nothing for {what} s",
        "advice": "keep the stack dump in the log; lower the load, or take speculation and the host cache out one by one",
    },
]

AFTERMATH = [
    {
        "id": "scheduler_died",
        "pattern": r"scheduler died during initialization \(exit code: (?P<code>-?\d+)\)",
        "cause": "the scheduler died during the start (exit code {code})",
        "advice": "-9 is the kernel (out of host memory) or someone's kill -9; else the traceback above it tells",
    },
    {
        "id": "child_died",
        "pattern": r"Subprocess (?P<what>\S+) \(pid=(?P<pid>\d+)\) crashed with exit code (?P<code>-?\d+)",
        "cause": "{what} (pid {pid}) died with exit code {code}",
        "advice": "-9 is the kernel (out of host memory) or someone's kill -9; else the traceback above it tells",
    },
    {
        "id": "scheduler_exception",
        "pattern": r"Scheduler hit an exception",
        "cause": "the scheduler hit an exception",
        "advice": "the traceback in the log tells",
    },
    {
        "id": "child_failed",
        "pattern": r"Received sigquit from a child proc",
        "cause": "one of SGLang's processes failed",
        "advice": "the log tells",
    },
]

_COMPILED = {id(entry): re.compile(entry["pattern"]) for entry in (*SPECIFIC, *AFTERMATH)}


def match(line, entries):
    """The verdict of the first entry that matches a line, or None: ``{"id", "cause", "advice", "line"}``."""
    for entry in entries:
        found = _COMPILED[id(entry)].search(line)
        if found:
            groups = {name: value or "" for name, value in found.groupdict().items()}
            return {
                "id": entry["id"],
                "cause": entry["cause"].format(**groups),
                "advice": entry["advice"].format(**groups),
                "line": line[:1000],
            }
    return None
