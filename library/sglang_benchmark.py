#!/usr/bin/python
# Copyright: sglang-fleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: sglang_benchmark
short_description: Measure a running SGLang server with SGLang's own benchmark
description:
  - Sends requests of a fixed length to a ready server with C(sglang.bench_serving) of the engine on the node,
    once for each concurrency, and returns the throughput and the latencies that it reports.
  - All concurrencies run in one process, because importing the benchmark takes longer than a short measurement.
  - It measures and changes nothing on the server, so C(changed) is always false. It leaves the records and the output
    of the benchmark in O(output_dir).
  - A request that fails fails the module. That includes requests that C(sglang.bench_serving) counts as completed
    although the server answered with an error inside the stream.
options:
  python:
    description: The Python of the engine. The default is the Python that runs this module.
    type: path
  host:
    description: Where the server listens, as seen from the node.
    type: str
    default: 127.0.0.1
  port:
    description: The port of the server.
    type: int
    required: true
  served_model_name:
    description: The name that the server gives its model. Another name at this port is refused.
    type: str
    required: true
  tokenizer:
    description: The folder of the model, for its tokenizer. Nothing is downloaded.
    type: path
    required: true
  concurrencies:
    description: How many requests to keep in flight, one run for each. The gate of a swap repeats one to get pairs of runs.
    type: list
    elements: int
    default: [1, 4, 16, 48]
  prompts:
    description:
      - A file on the node with the prompts to send, one JSON mapping a line, with C(prompt) or C(text), which are sent as they
        are, or with C(messages) or C(conversations), which are written with the model's chat template as far as the first
        answer. Without it the tokens are random, and O(input_tokens) are sent.
      - The server's prefix cache is emptied before each concurrency, since all of them send the same prompts. There must be
        as many prompts as the largest concurrency sends.
    type: path
  input_tokens:
    description:
      - Tokens in each request, at least 1. Together with O(output_tokens) they must fit the context, which
        M(sglang_benchmark_fit) tells before. Not read with O(prompts).
    type: int
    default: 128
  output_tokens:
    description: Tokens to generate for each request, at least 2 (the time per output token needs a second one).
    type: int
    default: 256
  prompts_per_concurrency:
    description: Requests of a run, as a multiple of its concurrency.
    type: int
    default: 4
  min_prompts:
    description: The least number of requests of a run.
    type: int
    default: 8
  seed:
    description:
      - Which prompts to send. V(0) takes new ones each time.
      - A server that has seen the same prompts answers them from its prefix cache, and the time to the first token is
        then that of the cache. Set a seed only to send the same prompts to servers that were started afresh.
      - Each run has a seed of its own, counted up from this one, so that no run finds the prompts of the run before.
    type: int
    default: 0
  timeout:
    description: Seconds for all runs together, with the imports.
    type: int
    default: 1800
  output_dir:
    description: A folder on the node for the records and the output. Created with mode 0755 if missing.
    type: path
    required: true
  label:
    description:
      - The stem of the file names in O(output_dir). A label that is there already is refused: nothing is overwritten.
    type: str
    required: true
  api_key:
    description: The key of the server. It is passed in the environment, never in a command line.
    type: str
  env:
    description: More environment for the benchmark, such as what the engine needs to be imported.
    type: dict
    default: {}
attributes:
  check_mode:
    description: Can run in check mode and return changed status prediction without modifying target.
    support: full
    details: Returns at once, skipped, with what it would run.
  diff_mode:
    description: Will return details on what has changed (or possibly needs changing in check_mode), when in diff mode.
    support: none
  platform:
    description: Target OS/families that can be operated against.
    support: full
    platforms: posix
author: sglang-fleet contributors
"""

EXAMPLES = r"""
- name: Measure the server at one and at eight requests in flight
  sglang_benchmark:
    port: 30000
    served_model_name: qwen
    tokenizer: /srv/models/qwen
    concurrencies: [1, 8]
    output_dir: /srv/sglang/benchmarks
    label: 20250131T120000Z
  vars:
    ansible_python_interpreter: /srv/sglang/venv/bin/python
  register: measured
"""

RETURN = r"""
runs:
  description:
    - One element for each concurrency that was measured, in the order asked.
    - After a failure, the runs up to and with the failed one, as far as they left a record. A run with failed requests
      has counts but no figures, since the benchmark counts some failures as answers that came at once.
  returned: except in check mode
  type: list
  elements: dict
  contains:
    concurrency: {description: Requests in flight., type: int}
    requests: {description: Requests sent., type: int}
    completed: {description: Requests that brought what was asked., type: int}
    failed: {description: Requests that did not., type: int}
    seed: {description: The seed of this run., type: int}
    duration_s: {description: Seconds from the first request to the last answer., type: float}
    output_tok_s: {description: Generated tokens per second., type: float}
    total_tok_s: {description: Tokens read and generated per second., type: float}
    input_tokens: {description: Tokens sent in all., type: int}
    output_tokens: {description: Tokens generated in all., type: int}
    ttft_ms: {description: "Milliseconds to the first token, C(median) and C(p99).", type: dict}
    tpot_ms: {description: "Milliseconds per output token after the first, C(median) and C(p99).", type: dict}
    accept_length:
      description:
        - Tokens accepted per step of speculative decoding, over the life of the server. V(null) without speculation.
      type: float
raw:
  description:
    - The records of C(sglang.bench_serving) on the node, one JSON line for each run, without the server's arguments,
      the texts and the gaps between tokens.
  returned: when it ran
  type: str
log:
  description: The output of the benchmark on the node.
  returned: when it ran
  type: str
command:
  description: What to type to repeat each run by hand. Where it says C(RECORDS) or C(PROMPTS), a private file stood.
  returned: always
  type: list
  elements: str
measured_at:
  description: When the measurement began, in UTC by the clock of the node.
  returned: when it ran
  type: str
elapsed:
  description: Seconds in all, with the imports.
  returned: when it ran
  type: float
output:
  description: The last lines of the benchmark's output; none where RV(errors) has the reason.
  returned: on failure
  type: list
  elements: str
errors:
  description: What the failed requests ended with, each text once.
  returned: on failure
  type: list
  elements: str
"""

import datetime
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.sglang_benchmark import (
    DRIVER,
    NO_TEXT,
    BenchmarkError,
    command_line,
    custom_dataset,
    failures,
    last_line,
    number_of_requests,
    offline,
    parse_records,
    prompts_of,
    storable,
    summarise,
    tokenized,
)

OUTPUT_LINES = 20


class Server:
    """The few requests that the module itself sends."""

    def __init__(self, host, port, api_key):
        self.base_url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        self.headers = {"Content-Type": "application/json"}
        if api_key:
            self.headers["Authorization"] = f"Bearer {api_key}"
        # A proxy of the login must not stand between the node and its own server.
        self.opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def answer(self, path, body=None, timeout=10):
        """Status and text of an answer; OSError where there is none."""
        data = json.dumps(body).encode() if body is not None else None
        request = urllib.request.Request(self.base_url + path, data=data, headers=self.headers)
        try:
            with self.opener.open(request, timeout=timeout) as response:
                return response.status, response.read().decode(errors="replace")
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode(errors="replace")

    def is_up(self):
        try:
            return self.answer("/v1/models")[0] == 200
        except OSError:
            return False

    def check(self, served_model_name):
        """Refuse a server that is not there, not ours to use, or not the one meant."""
        try:
            status, text = self.answer("/v1/models")
        except OSError as error:
            reason = getattr(error, "reason", error)
            raise BenchmarkError(f"No server answers at {self.base_url} ({reason}): start it before measuring it.") from error
        if status in (401, 403):
            raise BenchmarkError(
                f"The server at {self.base_url} refused the API key (HTTP {status}): "
                "set api_key to the one it was started with."
            )
        try:
            names = [model["id"] for model in json.loads(text)["data"]]
        except (ValueError, KeyError, TypeError) as error:
            raise BenchmarkError(
                f"What answers at {self.base_url} is no SGLang server (/v1/models: HTTP {status}, {text[:80]!r}): "
                "check the port."
            ) from error
        if served_model_name not in names:
            raise BenchmarkError(
                f"The server at {self.base_url} serves {', '.join(names)}, not {served_model_name}: "
                "set served_model_name to what it serves, or check the port."
            )

    def refusal(self, what, output_tokens):
        """Why the server refuses such a request, None if it does not: asked without streaming, it says so.

        ``what``: ``input_ids`` or ``text``, as its API has it.
        """
        body = {**what, "sampling_params": {"max_new_tokens": output_tokens, "ignore_eos": True}}
        try:
            status, text = self.answer("/generate", body, timeout=60)
        except OSError as error:
            return str(error)
        if status == 200:
            return None
        try:
            return json.loads(text)["error"]["message"]
        except (ValueError, KeyError, TypeError):
            return f"HTTP {status}: {text[:300]}"


class Benchmark:
    def __init__(self, module):
        self.module = module
        self.asked = module.params
        self.python = self.asked["python"] or sys.executable
        self.server = Server(self.asked["host"], self.asked["port"], self.asked["api_key"])
        first_seed = self.asked["seed"] or int(time.time())
        self.seeds = [first_seed + index for index in range(len(self.asked["concurrencies"]))]
        self.records = []
        self.texts = []
        self.raw = os.path.join(self.asked["output_dir"], self.asked["label"] + ".jsonl")
        self.log = os.path.join(self.asked["output_dir"], self.asked["label"] + ".log")

    def requests(self, concurrency):
        return number_of_requests(concurrency, self.asked["prompts_per_concurrency"], self.asked["min_prompts"])

    def command_lines(self, output_file, prompts=None):
        return [
            command_line(
                base_url=self.server.base_url,
                served_model_name=self.asked["served_model_name"],
                tokenizer=self.asked["tokenizer"],
                concurrency=concurrency,
                requests=self.requests(concurrency),
                input_tokens=self.asked["input_tokens"],
                output_tokens=self.asked["output_tokens"],
                seed=seed,
                output_file=output_file,
                prompts=prompts,
            )
            for concurrency, seed in zip(self.asked["concurrencies"], self.seeds)
        ]

    def command(self):
        start = [self.python, "-m", "sglang.bench_serving"]
        return [
            shlex.join(start + arguments)
            for arguments in self.command_lines("RECORDS", "PROMPTS" if self.asked["prompts"] else None)
        ]

    def reserve(self):
        """Create the file of the records, so that a label is used once."""
        try:
            os.makedirs(self.asked["output_dir"], mode=0o755, exist_ok=True)
            os.close(os.open(self.raw, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644))
        except FileExistsError:
            self.module.fail_json(msg=f"{self.raw} exists already: give another label, records are not overwritten.")
        except OSError as error:
            self.module.fail_json(
                msg=f"Cannot write {self.raw} ({error.strerror}): set output_dir to a folder that this user may write."
            )

    def measure(self):
        """Run the benchmark; BenchmarkError unless every request of every run brought what was asked."""
        self.server.check(self.asked["served_model_name"])
        if not os.path.isdir(self.asked["tokenizer"]):
            raise BenchmarkError(
                f"There is no folder {self.asked['tokenizer']}: set tokenizer to the model's folder on the node."
            )
        # bench_serving writes the server's keys into its records: they stay in a folder of our own, and go.
        private = tempfile.mkdtemp(prefix="sglang_benchmark_", dir=self.module.tmpdir)
        try:
            prompts = self._prompts(os.path.join(private, "prompts.jsonl")) if self.asked["prompts"] else None
            self._run(os.path.join(private, "records.jsonl"), private, prompts)
        finally:
            shutil.rmtree(private, ignore_errors=True)

    def _prompts(self, path):
        """Write the prompts as bench_serving reads them, and return the path."""
        source = self.asked["prompts"]
        prompts = list(prompts_of(source).values())
        most = max(self.requests(concurrency) for concurrency in self.asked["concurrencies"])
        if len(prompts) < most:
            raise BenchmarkError(
                f"{source} has {len(prompts)} prompts and concurrency {max(self.asked['concurrencies'])} sends {most}:"
                " give more prompts, or lower concurrencies or prompts_per_concurrency."
            )
        with open(path, "w", encoding="utf-8") as file:
            self.texts = self._texts(prompts)
            file.write(custom_dataset(self.texts))
        return path

    def _texts(self, prompts):
        """The prompts as text, chats through the model's own template."""
        if all(isinstance(prompt, str) for prompt in prompts):
            return prompts
        asked = self.asked
        written = tokenized(
            prompts, self.python, asked["tokenizer"], self._environment(), asked["timeout"], name=asked["prompts"]
        )
        return [text for text, _tokens in written]

    def _run(self, records, cwd, prompts):
        arguments = [self.python, "-c", DRIVER, records, json.dumps(self.command_lines(records, prompts))]
        status = None
        try:
            with open(self.log, "wb") as log:
                # In the process group of the module, so that what ends an async task ends the benchmark too.
                status = subprocess.run(
                    arguments,
                    cwd=cwd,
                    env=self._environment(),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    timeout=self.asked["timeout"],
                    check=False,
                ).returncode
        except subprocess.TimeoutExpired:
            pass
        except OSError as error:
            raise BenchmarkError(
                f"Cannot start {self.python} ({error.strerror}): set python to that of an installed engine."
            ) from error
        finally:
            self._take(records)
        self._judge(status)

    def _environment(self):
        environment = offline(self.asked["env"])
        if self.asked["api_key"]:
            environment["OPENAI_API_KEY"] = self.asked["api_key"]
        return environment

    def _take(self, records):
        """Keep what the benchmark has written so far, without the secrets in it."""
        try:
            with open(records, encoding="utf-8") as file:
                self.records = parse_records(file.read())
        except FileNotFoundError:
            return
        with open(self.raw, "w", encoding="utf-8") as file:
            for record, seed in zip(self.records, self.seeds):
                file.write(json.dumps(storable(record, seed), allow_nan=False) + "\n")

    def _judge(self, status):
        for record in self.records:
            failed = failures(record)
            if failed:
                if NO_TEXT in failed:
                    reason = self._refusal()
                    failed = [reason or text if text == NO_TEXT else text for text in failed]
                raise BenchmarkError(
                    f"{len(failed)} of {len(record['errors'])} requests to {self.server.base_url} failed "
                    f"at concurrency {record['max_concurrency']}, the first with: {failed[0]}",
                    failed,
                )
        if status == 0 and len(self.records) == len(self.asked["concurrencies"]):
            return
        current = self.asked["concurrencies"][min(len(self.records), len(self.asked["concurrencies"]) - 1)]
        if status is None:
            raise BenchmarkError(
                f"The benchmark of {self.server.base_url} took more than {self.asked['timeout']} s and was stopped "
                f"at concurrency {current}: raise timeout, or ask for fewer requests or tokens."
            )
        if not self.server.is_up():
            raise BenchmarkError(
                f"The server at {self.server.base_url} stopped answering during the benchmark "
                f"at concurrency {current}: see its log."
            )
        if status != 0:
            # When every request is refused it dies of a percentile of nothing: the server knows better.
            reason = self._refusal() or last_line(self._output())
            raise BenchmarkError(f"sglang.bench_serving ended with exit code {status} at concurrency {current}: {reason}")
        raise BenchmarkError(f"sglang.bench_serving ended without a record of concurrency {current}: see {self.log}.")

    def _refusal(self):
        output_tokens = self.asked["output_tokens"]
        if not self.asked["prompts"]:
            return self.server.refusal({"input_ids": [1] * self.asked["input_tokens"]}, output_tokens)
        # Which of the texts it was is not known: if any is too long, the longest is.
        longest = max(self.texts, key=len)
        reason = self.server.refusal({"text": longest}, output_tokens)
        where = f"prompt {self.texts.index(longest) + 1}, the longest with {len(longest):,} characters"
        return f"{reason} ({where})" if reason else None

    def _output(self):
        try:
            with open(self.log, encoding="utf-8", errors="replace") as file:
                return file.read()
        except FileNotFoundError:
            return ""

    def results(self):
        return {
            "runs": [summarise(record, seed) for record, seed in zip(self.records, self.seeds)],
            "raw": self.raw,
            "log": self.log,
            "command": self.command(),
        }

    def output_tail(self):
        return self._output().splitlines()[-OUTPUT_LINES:]


def refuse_bad_numbers(module):
    least = {
        "input_tokens": 1,
        "output_tokens": 2,
        "prompts_per_concurrency": 1,
        "min_prompts": 1,
        "timeout": 1,
        "seed": 0,
    }
    for name, value in least.items():
        if module.params[name] < value:
            module.fail_json(msg=f"{name} is {module.params[name]}: it must be at least {value}.")
    concurrencies = module.params["concurrencies"]
    if not concurrencies or min(concurrencies) < 1:
        module.fail_json(msg=f"concurrencies is {concurrencies}: it must list at least one number, each 1 or more.")
    if os.path.basename(module.params["label"]) != module.params["label"]:
        module.fail_json(msg=f"label is {module.params['label']!r}: it must be a file name without a folder.")


def main():
    module = AnsibleModule(
        argument_spec=dict(
            python=dict(type="path"),
            host=dict(type="str", default="127.0.0.1"),
            port=dict(type="int", required=True),
            served_model_name=dict(type="str", required=True),
            tokenizer=dict(type="path", required=True),
            concurrencies=dict(type="list", elements="int", default=[1, 4, 16, 48]),
            prompts=dict(type="path"),
            input_tokens=dict(type="int", default=128),
            output_tokens=dict(type="int", default=256),
            prompts_per_concurrency=dict(type="int", default=4),
            min_prompts=dict(type="int", default=8),
            seed=dict(type="int", default=0),
            timeout=dict(type="int", default=1800),
            output_dir=dict(type="path", required=True),
            label=dict(type="str", required=True),
            api_key=dict(type="str", no_log=True),
            env=dict(type="dict", default={}),
        ),
        supports_check_mode=True,
    )
    refuse_bad_numbers(module)
    benchmark = Benchmark(module)
    if module.check_mode:
        module.exit_json(
            changed=False,
            skipped=True,
            msg=f"Would measure {benchmark.server.base_url} at {len(benchmark.seeds)} concurrencies.",
            command=benchmark.command(),
        )
    started = time.monotonic()
    measured_at = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
    benchmark.reserve()
    error = None
    try:
        benchmark.measure()
    except BenchmarkError as caught:
        error = caught
    results = dict(benchmark.results(), measured_at=measured_at, elapsed=round(time.monotonic() - started, 3))
    if error:
        # After failed requests the output ends in figures that look like success.
        output = [] if error.errors else benchmark.output_tail()
        module.fail_json(msg=str(error), errors=error.errors, output=output, **results)
    module.exit_json(changed=False, **results)


if __name__ == "__main__":
    main()
