# Copyright: sglang-fleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Why a start or a server fails: one entry a cause. Add yours here, and a log that shows it to tests/data/logs/lines.yml.

Each entry is data:

``id``      a short name, stable: records and tests refer to it
``phrase``  a regular expression, searched in each line of the log; its named groups fill the texts
``cause``   what happened, in one sentence
``advice``  what to do about it; of a list, the first whose numbers are all known
``stage``   the stages in which the phrase means this, of ``STAGES_HERE``; left out: any
``since``   the first release that prints it, ``until`` the last one; left out: no such limit is known
``sure``    False for a phrase that a healthy server may log too: it counts only when a process has died as well
``source``  where it was seen

The log is walked from the top, and the first line that matches wins: what follows it in a log is aftermath. After ready
the walk begins where the server last served: what it outlived did not end it. The entries of ``AFTERMATH`` say only that
some process died, or may have (``sure``). They are what is reported when nothing specific was logged, together with the
last exception. ``REDUCTIONS`` are no failures: the server serves, with less than was asked for.

Numbers that texts may use beside the phrase's own groups: ``{raise_to}`` and ``{lower_to}`` (fractions of memory that
would do), ``{hicache_at_most}`` (GB); ``numbers`` works them out of the phrase's groups and of what the log told before.
"""

from __future__ import annotations

import math
import re

# Stages of a start as sglang_log has them, and three that only failures tell apart: between weights and pools, the
# capture of a draft model's graphs, and the time after ready.
STAGES_HERE = (
    "import", "weights", "memory pools", "state pool", "KV pool", "graph capture", "draft graph capture", "host pools",
    "warm-up", "ready",
)  # fmt: skip
SERVING = ("warm-up", "ready")
POOLS = ("memory pools", "state pool", "KV pool")
CAPTURE = ("graph capture", "draft graph capture")

_SGLANG = "https://github.com/sgl-project/sglang"
# Everything before it in a line is the logger's; torch and HIP spell it in two ways.
_NO_GPU_MEMORY = (
    r"(?:CUDA|HIP) out of memory\. Tried to allocate (?P<need>[\d.]+ \w+)"
    r"(?:.*?of which (?P<free>[\d.]+ \w+) is free)?"
)

SPECIFIC = [
    # -- flags --------------------------------------------------------------------------------------------------------
    {
        "id": "unknown_flag",
        "phrase": r"error: unrecognized arguments: (?P<what>.+)",
        "stage": ("import",),
        "cause": "this SGLang does not know {what}",
        "advice": "take the flag out of the profile, or spell it for this release in group_vars/all/releases.yml",
        "source": f"{_SGLANG}/issues/555",
    },
    {
        "id": "bad_choice",
        "phrase": r"error: argument (?P<flag>\S+): (?P<what>.+)",
        "stage": ("import",),
        "cause": "flag {flag}: {what}",
        "advice": "give the flag a value that this release takes",
        "source": "SGLang 0.5.23 on a CPU",
    },
    {
        "id": "context_too_long",
        # With an override in the environment it is a warning of the same words.
        "phrase": r"ValueError: .*User-specified context_length \((?P<asked>\d+)\) is greater than the derived"
        r" context_length \((?P<has>\d+)\)",
        "cause": "context-length {asked} is more than the model's {has}",
        "advice": "set context-length to at most {has}",
        "source": "SGLang 0.5.23 on a CPU",
    },
    {
        "id": "state_strategy",
        "phrase": r"no_buffer do not support (?:overlap schedule|trtllm_mha)"
        r"|is not compatible with radix cache when using --mamba-\S+ no_buffer",
        "cause": "the state-cache strategy no_buffer does not go with these flags",
        "advice": "set mamba-radix-cache-strategy to extra_buffer",
        "source": f"{_SGLANG}/pull/22908",
    },
    {
        "id": "needs_gpu",
        "phrase": r"(?P<what>extra_buffer requires platform support|Mamba extra_buffer is only supported on CUDA"
        r"|Torch not compiled with CUDA enabled|is not supported in decode attention backend torch_native)",
        "cause": "this profile needs a CUDA GPU ({what})",
        "advice": "use a profile that runs on this device",
        "source": "SGLang 0.5.23 on a CPU",
    },
    {
        "id": "exclusive_flags",
        "phrase": r"(?P<what>\S+ and \S+ are mutually exclusive)",
        "cause": "{what}",
        "advice": "keep one of the two flags",
        "source": f"{_SGLANG}/pull/9452",
    },
    {
        "id": "weight_overlap",
        "phrase": r"--startup-weight-load-mode=overlap is not supported: (?P<what>.+)",
        "since": "0.5.18",
        "cause": "startup-weight-load-mode overlap is not supported here: {what}",
        "advice": "take startup-weight-load-mode out of the profile",
        "source": "a public repository's notes on 0.5.18",
    },
    {
        "id": "incompatible_flags",
        "phrase": r"(?P<one>--[\w-]+) is incompatible with (?P<other>[^.]+)",
        "since": "0.5.11",
        "cause": "{one} is incompatible with {other}",
        "advice": "take one of the two out of the profile",
        "source": f"{_SGLANG}/pull/19746",
    },
    {
        "id": "hisparse_draft",
        "phrase": r"'HiSparse\w+' object has no attribute 'full_to_hisparse_device_index_mapping'",
        "since": "0.5.10",
        "cause": "HiSparse does not go with speculative decoding in this release",
        "advice": "take speculation or HiSparse out of the profile",
        "source": "a public repository's notes on 0.5.13.post1",
    },
    {
        "id": "hybrid_draft",
        "phrase": r"has no attribute 'update_mamba_state_after_mtp_verify'",
        "cause": "this release's attention backend has no speculative decoding for hybrid models",
        "advice": "use a release after 0.5.12, or a profile without speculation",
        "source": f"{_SGLANG}/issues/25766",
    },
    {
        "id": "hybrid_hicache",
        "phrase": r"Destination indices must be a CUDA tensor",
        "since": "0.5.16",
        "until": "0.5.17",
        "cause": "the hierarchical cache of a hybrid model fails at its first request in this release",
        "advice": "set hicache-io-backend to direct, or use a newer release",
        "source": f"{_SGLANG}/issues/24121",
    },
    {
        "id": "state_ping_pong",
        "phrase": r"Not enough space for mamba ping pong idx",
        "cause": "the state cache has no slot left for a running request's second buffer",
        "advice": "raise max-mamba-cache-size or mamba-full-memory-ratio, or lower max-running-requests",
        "source": f"{_SGLANG}/pull/19002",
    },
    {
        "id": "offload_tied_weights",
        "phrase": r"functional_call got multiple values for keys",
        "cause": "weights are offloaded to the host that this model uses twice",
        "advice": "take cpu-offload-gb out of the profile",
        "source": "https://github.com/noonghunna/club-3090",
    },
    {
        "id": "kv_scales",
        "phrase": r"NVFP4 KV cache global scales must be calibrated before CUDA graph capture",
        "cause": "an NVFP4 KV cache needs scales that this checkpoint does not hold",
        "advice": "set kv-cache-dtype to fp8_e4m3",
        "source": "https://github.com/jethac/dgx-spark-hijinks",
    },
    # -- engine and GPU -----------------------------------------------------------------------------------------------
    {
        "id": "attention_backend",
        "phrase": r"(?P<what>FlashAttention v3 Backend requires SM>=80 and SM<=90"
        r"|Error in function 'TllmGenFmhaRunner'.*?[Uu]nsupported archi)",
        "cause": "the attention backend does not run on this GPU ({what})",
        "advice": "choose another attention-backend, such as triton or flashinfer",
        "source": f"{_SGLANG}/issues/40558",
    },
    {
        "id": "gpu_too_old",
        "phrase": r"SGLang only supports (?P<what>sm\d+) and above",
        "cause": "this GPU is older than {what}, the oldest that SGLang runs on",
        "advice": "use another GPU",
        "source": "a public repository's notes",
    },
    {
        "id": "no_gpu",
        "phrase": r"(?P<what>No CUDA GPUs are available|Found no NVIDIA driver"
        r"|CUDA driver version is insufficient for CUDA runtime version)",
        "cause": "the engine finds no GPU that it can use ({what})",
        "advice": "look at nvidia-smi on the node: the driver is gone, too old, or the GPU is not visible",
        "source": "torch's own words",
    },
    {
        "id": "model_unknown",
        "phrase": r"(?P<what>\S+) has no SGlang implementation and the Transformers implementation is not compatible",
        "cause": "this SGLang does not know models of class {what}",
        "advice": "use a newer release",
        "source": f"{_SGLANG}/issues/12835",
    },
    {
        "id": "engine_incomplete",
        "phrase": r"ModuleNotFoundError: No module named '(?P<what>[^']+)'",
        "sure": False,
        "cause": "the engine lacks the Python module {what}",
        "advice": "install it into the engine's venv, or use flags that do not need it",
        "source": "SGLang 0.5.23 on a CPU",
    },
    # -- the model's files --------------------------------------------------------------------------------------------
    {
        "id": "bad_model_path",
        "phrase": r"OSError: (?:Repo id must be in the form .*?: '(?P<what>[^']+)'"
        r"|(?P<other>\S+) is not a local folder)",
        "cause": "there is no model folder {what}{other}",
        "advice": "correct the model's path in group_vars/all/models.yml, or put the model there",
        "source": "SGLang 0.5.17 on an H200, 0.5.23 on a CPU",
    },
    {
        "id": "no_config",
        "phrase": r"ValueError: Unrecognized model in (?P<what>\S+?)\.? Should have a `model_type` key",
        "cause": "{what} holds no config.json that names a model type",
        "advice": "complete the model folder",
        "source": "SGLang 0.5.23 on a CPU",
    },
    {
        "id": "no_processor",
        "phrase": r"OSError: Can't load (?P<kind>[\w ]*?processor) for '(?P<what>[^']+)'",
        "cause": "the model folder {what} holds no {kind} file",
        "advice": "copy preprocessor_config.json from the model that it was derived from",
        "source": "a public repository's notes",
    },
    {
        "id": "no_weights",
        "phrase": r"Cannot find any model weights with `(?P<what>[^`]+)`",
        "stage": ("weights",),
        "cause": "the model folder {what} holds no weights",
        "advice": "copy the weights there",
        "source": "SGLang 0.5.23 on a CPU",
    },
    {
        "id": "missing_shard",
        "phrase": r"FileNotFoundError: .*?(?P<what>[^ '\"]*model-\d+-of-\d+\.safetensors)",
        "cause": "the weight file {what} is missing",
        "advice": "copy it; in a linked cache, check that the link's target is there too",
        "source": "a public repository's notes (13 of 35 jobs)",
    },
    {
        "id": "broken_shard",
        "phrase": r"safetensors_rust\.SafetensorError: (?P<what>.+)|SafetensorError: (?P<other>.+)",
        "stage": ("import", "weights"),
        "cause": "a weight file is damaged ({what}{other})",
        "advice": "copy the model again",
        "source": "safetensors' own words",
    },
    {
        "id": "vocabulary",
        "phrase": r"org_vocab_size=(?P<has>\d+).*?loaded_weight\.shape\[\w+\]=(?P<found>\d+)",
        "stage": ("weights",),
        "cause": "config.json says a vocabulary of {has} and the weights hold {found}",
        "advice": "correct the checkpoint's vocab_size",
        "source": "a public repository's notes",
    },
    # -- memory of the card -------------------------------------------------------------------------------------------
    {
        "id": "graph_capture_memory",
        "phrase": rf"Capture (?:cuda|CUDA) graph failed: {_NO_GPU_MEMORY}",
        "cause": "the GPU's memory did not last for the CUDA graphs ({need} more were wanted)",
        "advice": [
            "lower cuda-graph-max-bs to the requests that run, or mem-fraction-static to {lower_to}",
            "lower cuda-graph-max-bs to the requests that run, or mem-fraction-static",
        ],
        "source": f"{_SGLANG}/issues/5285",
    },
    {
        "id": "gpu_busy",
        "phrase": _NO_GPU_MEMORY + r".*?Process (?P<pid>\d+) has (?P<used>[\d.]+ GiB) memory in use",
        "stage": ("import", "weights", *POOLS, *CAPTURE),
        "cause": "the GPU had no {need} left: pid {pid} holds {used} of it",
        "advice": "end that process, or raise mem-fraction-static only if what is left is enough",
        "source": "SGLang 0.5.17 on an H200 with 30 GB free",
    },
    {
        "id": "weights_memory",
        "phrase": _NO_GPU_MEMORY,
        "stage": ("import", "weights"),
        "cause": "the weights do not fit on the GPU: {need} more were wanted",
        "advice": "use more GPUs a server or a checkpoint that is quantised already; mem-fraction-static does not help",
        "source": f"{_SGLANG}/issues/10736",
    },
    {
        "id": "no_kv_memory",
        "phrase": r"Loaded weights leave no GPU memory for the KV cache under --mem-fraction-static=(?P<has>[\d.]+)\. Raise"
        r" --mem-fraction-static above (?P<least>[\d.]+?)\.?(?: |$)",
        "since": "0.5.14",
        "cause": "the weights leave no memory for the KV cache at mem-fraction-static {has}",
        "advice": "raise mem-fraction-static above {least}",
        "source": "SGLang 0.5.23 on a CPU",
    },
    {
        "id": "no_kv_memory",
        "phrase": r"Loaded weights leave no GPU memory for the KV cache"
        r"|Not enough memory\. Please try to increase --mem-fraction-static",
        "cause": "the weights leave no memory for the KV cache",
        "advice": "raise mem-fraction-static, or use more GPUs or a smaller checkpoint",
        "source": f"{_SGLANG}/issues/4330",
    },
    {
        "id": "no_state_memory",
        "phrase": r"Not enough GPU memory for hybrid .*?total_rest_memory=(?P<rest>-?[\d.]+) GB"
        r"(?:, mamba_cache_per_req=(?P<slot_mb>[\d.]+) MB)?",
        "since": "0.5.13",
        "cause": "the weights leave no memory for the hybrid model's state cache ({rest} GiB)",
        "advice": [
            "raise mem-fraction-static to {raise_to} or more: it is a share of the {card} GiB that were free at the start",
            "raise mem-fraction-static: it is a share of the memory that is free at the start",
        ],
        "source": "SGLang 0.5.17 on an H200",
    },
    {
        "id": "pool_memory",
        "phrase": _NO_GPU_MEMORY,
        "stage": POOLS,
        "cause": "the GPU had no {need} left for the state and KV pools",
        "advice": [
            "lower mem-fraction-static to {lower_to}; on WSL use native Linux, whose driver does not hide memory",
            "lower mem-fraction-static; on WSL use native Linux, whose driver does not hide memory",
        ],
        "source": f"{_SGLANG}/issues/24364",
    },
    {
        "id": "draft_graph_memory",
        "phrase": _NO_GPU_MEMORY,
        "stage": ("draft graph capture",),
        "cause": "the GPU had no {need} left for the draft model's CUDA graphs",
        "advice": [
            "lower max-running-requests first (it sizes the draft's state), then mem-fraction-static to {lower_to}",
            "lower max-running-requests first (it sizes the draft's state), then mem-fraction-static",
        ],
        "source": "a public repository's notes",
    },
    {
        "id": "graph_capture_memory",
        "phrase": _NO_GPU_MEMORY + r"|num_active_captures_",
        "stage": CAPTURE,
        "cause": "the GPU's memory did not last for the CUDA graphs",
        "advice": [
            "lower cuda-graph-max-bs to the requests that run, or mem-fraction-static to {lower_to}",
            "lower cuda-graph-max-bs to the requests that run, or mem-fraction-static",
        ],
        "source": f"{_SGLANG}/issues/35777, https://github.com/noonghunna/club-3090/pull/1331",
    },
    {
        "id": "graph_capture",
        "phrase": r"Capture (?:cuda|CUDA) graph failed: (?P<what>.{1,200})",
        "cause": "the CUDA graphs could not be captured: {what}",
        "advice": "disable-cuda-graph shows whether it is the graphs; then try another attention-backend",
        "source": f"{_SGLANG}/issues/4489",
    },
    {
        "id": "hicache_gpu_memory",
        "phrase": _NO_GPU_MEMORY,
        "stage": ("host pools",),
        "cause": "the GPU had no {need} left when the host cache was set up",
        "advice": ["lower mem-fraction-static to {lower_to}", "lower mem-fraction-static: it needs room on the GPU too"],
        "source": f"{_SGLANG}/issues/5372",
    },
    {
        "id": "request_memory",
        "phrase": _NO_GPU_MEMORY + r"|Prefill out of memory\. Try to lower your batch size",
        "stage": SERVING,
        "sure": False,
        "cause": "the GPU had no memory left for a request",
        "advice": "lower chunked-prefill-size, such as to 2048, or mem-fraction-static by 0.02",
        "source": f"{_SGLANG}/issues/27215",
    },
    {
        "id": "gpus_unequal",
        "phrase": r"RuntimeError: The memory capacity is unbalanced",
        "cause": "one of the server's GPUs has less free memory than the others",
        "advice": "end what holds it (nvidia-smi), such as workers of a server that was killed",
        "source": "a public repository's notes",
    },
    {
        "id": "gpu_fault",
        "phrase": r"CUDA error: (?P<what>(?!out of memory)[^\n]{1,120})",
        "sure": False,
        "cause": "the GPU or its driver failed: {what}",
        "advice": "look at the driver's messages (dmesg, Xid) and try another GPU; then another attention backend",
        "source": "torch's own words",
    },
    # -- memory of the host -------------------------------------------------------------------------------------------
    {
        "id": "no_host_memory",
        "phrase": r"Not enough host memory available\. Requesting (?P<asked>[\d.]+) GB but only have (?P<has>[\d.]+) GB free",
        "cause": "the host cache asks for {asked} GB and the node has {has} GB free",
        "advice": [
            "lower hicache-size to {hicache_at_most} or less, for all servers of the node together: it is per GPU, and 10 GB"
            " of the node stay free",
            "lower hicache-size: it is per GPU and 10 GB of the node stay free",
        ],
        "source": f"{_SGLANG}/pull/8102, SGLang 0.5.17 on an H200",
    },
    {
        "id": "host_pool_small",
        "phrase": r"The host memory should be larger than the device memory with the current protocol",
        "until": "0.5.14",
        "cause": "the host cache is smaller than the GPU's own",
        "advice": "raise hicache-size above the KV cache's size, or hicache-ratio above 1",
        "source": "SGLang 0.5.9's own words",
    },
    {
        "id": "pin_refused",
        "phrase": r"cudaHostRegister failed \(rc=(?P<rc>\d+), (?P<what>[^)]*)\)",
        "since": "0.5.13",
        "sure": False,
        "cause": "the driver refused to pin the host cache (rc {rc}, {what}), so what it copies may be stale",
        "advice": "lower hicache-size, and look at ulimit -l",
        "source": "https://github.com/SemiAnalysisAI/InferenceX/pull/2146",
    },
    {
        "id": "host_memory_refused",
        "phrase": r"DefaultCPUAllocator: can't allocate memory: you tried to allocate (?P<bytes>\d+) bytes"
        r"|OSError: \[Errno 12\] Cannot allocate memory|^MemoryError",
        "sure": False,
        "cause": "the node gave no more host memory",
        "advice": "lower hicache-size, run fewer servers on the node, or lift its limits (ulimit -v, the cgroup's)",
        "source": "torch's own words",
    },
    {
        "id": "os_limit",
        "phrase": r"(?P<what>Resource temporarily unavailable|can't start new thread|Too many open files)",
        "sure": False,
        "cause": "a limit of the operating system was reached ({what})",
        "advice": "look at ulimit -u, -v and -n of the user, and at the cgroup's pids.max",
        "source": "SGLang 0.5.23 on a CPU under ulimit -v",
    },
    {
        "id": "disk_full",
        "phrase": r"No space left on device",
        "sure": False,
        "cause": "a disk of the node is full",
        "advice": "free space below the fleet's folder, /tmp and /dev/shm",
        "source": "the operating system's own words",
    },
    {
        "id": "core_binding",
        "phrase": r"Core (?P<core>\d+) inside NUMA node (?P<node>\d+) not found",
        "cause": "core {core} of NUMA node {node}, which the server should be bound to, is not visible",
        "advice": "take the core binding out of the profile's env",
        "source": "a public repository's notes",
    },
    # -- ports and network --------------------------------------------------------------------------------------------
    {
        "id": "port_in_use",
        "phrase": r"error while attempting to bind on address \('(?P<host>[^']+)', (?P<port>\d+)\): address already in use",
        "cause": "port {port} was taken by another process during the start",
        "advice": "free the port, or give the server another one in the inventory",
        "source": "SGLang 0.5.17 on an H200, 0.5.23 on a CPU",
    },
    {
        "id": "internal_port_in_use",
        "phrase": r"ZMQError: Address already in use(?: \(addr='(?P<what>[^']+)'\))?"
        r"|failed to listen on any local network address.*?port: (?P<port>\d+)",
        "cause": "a port that SGLang uses between its processes is taken ({what}{port})",
        "advice": "keep the servers' ports further apart in the inventory",
        "source": f"{_SGLANG}/issues/17402",
    },
    {
        "id": "two_starts_at_once",
        "phrase": r"hipIpcGetMemHandle failed|NCCL error: unhandled cuda error",
        "sure": False,
        "cause": "the GPUs could not be joined: another server may have been starting on the node at this moment",
        "advice": "deploy this server again by itself (--limit)",
        "source": "a public repository's notes",
    },
    {
        "id": "nccl",
        "phrase": r"NCCL error: (?P<what>[^(\n]{1,120})",
        "sure": False,
        "cause": "the GPUs could not be joined: NCCL says {what}",
        "advice": "look at the size of /dev/shm, then set NCCL_DEBUG=INFO and NCCL_SOCKET_IFNAME in the profile's env",
        "source": f"{_SGLANG}/issues/8974",
    },
    # -- while serving ------------------------------------------------------------------------------------------------
    {
        "id": "watchdog",
        "phrase": r"Scheduler watchdog timeout \(watchdog_timeout=(?P<what>[\d.]+)",
        "cause": "the scheduler did nothing for {what} s",
        "advice": "keep the stack dump in the log; lower the load, or take speculation and the host cache out one by one",
        "source": f"{_SGLANG}/issues/34235",
    },
    {
        "id": "not_a_number",
        "phrase": r"probability tensor contains (?:either )?`?inf",
        "sure": False,
        "cause": "the model computed no probabilities (inf or nan)",
        "advice": "try another GPU; when it comes back there, the checkpoint's quantisation is at fault",
        "source": "a public repository's notes",
    },
]  # fmt: skip

SPECIFIC_IDS = frozenset(entry["id"] for entry in SPECIFIC)

# What to do about an exit code, for those who only know that a process died.
EXIT_CODES = {
    "-9": "see dmesg whether the kernel killed it (-9) for want of host memory, or ask who did",
    "-15": "ask who sent it SIGTERM (-15): a person, or a daemon such as earlyoom",
    "-11": "it is a segmentation fault (-11): keep the core and change the attention or MoE backend",
    "-6": "it is an abort (-6): read of what in the lines above it in the log",
    "-3": "it is SGLang's own (-3): read why in the traceback above it in the log",
    "-7": "it is a bus error (-7): free space in /dev/shm",
}
_EXIT = "{exit}; then deploy again"
# A deploy never stops a server that was ready.
_EXIT_SERVING = "{exit}; then stop.yml and deploy.yml"

_CHILD_DIED = r"Subprocess (?P<what>\S+) \(pid=(?P<pid>\d+)\) crashed with exit code (?P<code>-?\d+)"

AFTERMATH = [
    {
        "id": "scheduler_died",
        "phrase": r"(?P<who>scheduler|detokenizer) died during initialization \(exit code: (?P<code>-?\d+)\)",
        "since": "0.5.10",
        "cause": "the {who} died during the start (exit code {code})",
        "advice": _EXIT,
        "source": f"{_SGLANG}/pull/20287",
    },
    {
        "id": "child_died",
        "phrase": _CHILD_DIED,
        "stage": STAGES_HERE[:-1],
        "cause": "{what} (pid {pid}) died with exit code {code}",
        "advice": _EXIT,
        "source": "SGLang 0.5.17 on an H200, 0.5.23 on a CPU",
    },
    {
        "id": "child_died",
        "phrase": _CHILD_DIED,
        "stage": ("ready",),
        "cause": "{what} (pid {pid}) died with exit code {code}",
        "advice": _EXIT_SERVING,
        "source": "SGLang 0.5.17 on an H200, 0.5.23 on a CPU",
    },
    {
        "id": "other_rank",
        "phrase": r"could finish the model loading, but there are other ranks that didn't"
        r"|monitoredBarrier, but received errors|Connection closed by peer \[",
        "cause": "another of the server's processes died or was too slow to load",
        "advice": "look at the host memory and the disk of the node that it runs on",
        "source": f"{_SGLANG}/issues/5602, {_SGLANG}/issues/4503",
    },
    {
        "id": "detokenizer_silent",
        "phrase": r"couldn't get a response from detokenizer for last (?P<what>\d+) seconds",
        "sure": False,
        "cause": "its scheduler or detokenizer did not answer for {what} s",
        "advice": "a long prefill can do that; when it stays, stop.yml and deploy.yml",
        "source": f"{_SGLANG}/issues/10856",
    },
    {
        "id": "scheduler_exception",
        "phrase": r"Scheduler hit an exception",
        "cause": "the scheduler hit an exception",
        "advice": "the traceback in the log tells",
        "source": "SGLang 0.5.17 on an H200, 0.5.23 on a CPU",
    },
    {
        "id": "child_failed",
        "phrase": r"Received sigquit from a child proc",
        "cause": "one of SGLang's processes failed",
        "advice": "the log tells",
        "source": f"{_SGLANG}/issues/3460",
    },
    {
        "id": "terminated",
        "phrase": r"SIGTERM received\. .*Draining requests",
        "cause": "it was sent SIGTERM, drained and ended",
        "advice": "somebody stopped it, by hand or in a way that could not be written down",
        "source": "SGLang 0.5.17 on an H200, 0.5.23 on a CPU",
    },
]
# Of these a process has surely died: what else the log holds is confirmed by them.
DEATHS = ("scheduler_died", "child_died", "scheduler_exception", "child_failed")
# With these the end begins, though requests may still be served to their own end.
ENDS = (*DEATHS, "terminated")

REDUCTIONS = [
    {
        "id": "kv_tokens",
        "phrase": r"max_total_tokens=(?P<asked>\d+) is larger than the profiled value (?P<got>-?\d+)",
        "cause": "asked for {asked} KV tokens, got {got}: GPU memory",
        "source": f"{_SGLANG}/issues/7691",
    },
    {
        "id": "host_pool",
        "phrase": r"HiCache (?:host KV|\w+ host) pool \((?P<got>\d+) tokens\) is smaller than the device pool \((?P<asked>\d+)"
        r" tokens\)",
        "since": "0.5.15",
        "cause": "the host cache holds {got} tokens, less than the GPU's {asked}: it adds little, raise hicache-size",
        "source": "SGLang 0.5.17 on an H200",
    },
    {
        "id": "pin_budget",
        "phrase": r"Pin budget: 0 tokens",
        "cause": "the host cache pins nothing",
        "source": f"{_SGLANG}/issues/21880",
    },
    {
        "id": "pin_refused",
        "phrase": r"cudaHostRegister failed \(rc=(?P<rc>\d+), (?P<what>[^)]*)\)",
        "cause": "the driver refused to pin the host cache (rc {rc}, {what}): what it copies may be stale",
        "source": "https://github.com/SemiAnalysisAI/InferenceX/pull/2146",
    },
    {
        "id": "gpus_unequal",
        "phrase": r"(?<!RuntimeError: )The memory capacity is unbalanced",
        "cause": "one of its GPUs has less free memory than the others, and all have to do with that much",
        "source": "a public repository's notes",
    },
]

_PLACEHOLDER = re.compile(r"{(\w+)}")


def compiled(entry):
    """An entry's phrase as a pattern; ``ValueError`` says which entry of this file is none, and why."""
    where = f"module_utils/sglang_failures.py: entry '{entry.get('id')}'"
    missing = [key for key in ("id", "phrase", "cause") if not isinstance(entry.get(key), str)]
    if missing:
        raise ValueError(f"{where} has no {missing[0]}: add it as text")
    stages = entry.get("stage", ())
    wrong = [stage for stage in stages if stage not in STAGES_HERE] if isinstance(stages, tuple) else [stages]
    if wrong:
        raise ValueError(f"{where} has the stage {wrong[0]!r}: expected a tuple of {', '.join(STAGES_HERE)}")
    try:
        return re.compile(entry["phrase"])
    except re.error as error:
        raise ValueError(f"{where} has a phrase that is no regular expression ({error}): correct it") from None


_COMPILED = {id(entry): compiled(entry) for entry in (*SPECIFIC, *AFTERMATH, *REDUCTIONS)}
_UNITS = {"B": 1 / (1 << 30), "KiB": 1 / (1 << 20), "MiB": 1 / (1 << 10), "GiB": 1.0, "TiB": 1024.0}


def release_key(release):
    """A release as numbers that compare: 0.5.12.post1 comes after 0.5.12 and before 0.5.13."""
    return [int(number) for number in re.findall(r"\d+", str(release))[:4]]


def applies(entry, release):
    """Does this release print an entry's phrase? Yes where it is not known."""
    if not release:
        return True
    here = release_key(release)
    since, until = entry.get("since"), entry.get("until")
    return (not since or here >= release_key(since)) and (not until or here[:3] <= release_key(until)[:3])


def _gib(text):
    """``676.81 MiB`` as a number of GiB, or None."""
    number, _, unit = (text or "").partition(" ")
    try:
        return float(number) * _UNITS[unit]
    except (ValueError, KeyError):
        return None


def numbers(groups, told):
    """Numbers for an advice, as text, by name; only those that can be known.

    ``groups``: what the phrase found. ``told``: what the log said before, ``fraction`` (mem-fraction-static),
    ``free_gpu_gib`` (free before the weights) and ``hicache_gb`` (hicache-size).
    """
    found = {}
    fraction, card = told.get("fraction"), told.get("free_gpu_gib")
    if card:
        found["card"] = f"{card:.1f}"
    if fraction and card and groups.get("rest"):
        # Five slots are what one request takes with extra_buffer; less is no server.
        missing = 5 * float(groups.get("slot_mb") or 0) / 1024 - float(groups["rest"])
        wanted = math.ceil(100 * (fraction + missing / card)) / 100
        if fraction < wanted <= 0.97:
            found["raise_to"] = f"{wanted:.2f}"
    need, free = _gib(groups.get("need")), _gib(groups.get("free"))
    if fraction and card and need is not None and free is not None:
        wanted = math.floor(100 * (fraction - (need - free) / card)) / 100 - 0.01
        if 0 < wanted < fraction:
            found["lower_to"] = f"{wanted:.2f}"
    if groups.get("has") and groups.get("asked") and told.get("hicache_gb"):
        found["hicache_at_most"] = str(math.floor(float(groups["has"])))
    if groups.get("code"):
        found["exit"] = EXIT_CODES.get(groups["code"], "read the lines above it in the log")
    return found


def match(line, entries, stage=None, release=None, told=None):
    """The verdict of the first entry that matches a line, or None: ``{"id", "cause", "advice", "line", "sure"}``.

    ``stage`` and ``release`` leave out entries of other stages and releases where they are known, ``told`` is for
    ``numbers``.
    """
    for entry in entries:
        if (stage and entry.get("stage") and stage not in entry["stage"]) or not applies(entry, release):
            continue
        found = _COMPILED[id(entry)].search(line)
        if found:
            groups = {name: value or "" for name, value in found.groupdict().items()}
            values = {**groups, **numbers(groups, told or {})}
            return {
                "id": entry["id"],
                "cause": entry["cause"].format(**values),
                "advice": _advice(entry.get("advice", ""), values),
                "line": line[:1000],
                "sure": entry.get("sure", True),
            }
    return None


def _advice(advice, values):
    """The first advice whose numbers are all known."""
    choices = [advice] if isinstance(advice, str) else advice
    fitting = (text for text in choices if all(name in values for name in _PLACEHOLDER.findall(text)))
    return next(fitting, choices[-1]).format(**values)
