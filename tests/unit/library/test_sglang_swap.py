# Copyright: sglang-fleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The record of a swap: what is kept before a stop, what a second one finds, and how it is closed."""

from __future__ import annotations

import json
import os
import stat
import time
from pathlib import Path

import pytest
from ansible.module_utils.sglang_process import identity
from ansible.module_utils.sglang_state import Paths, read_state, write_atomic, write_state
from helpers.swap import begun

KEY = "s3cret-of-the-tests"
SCRIPT = "#!/bin/sh\nexec true\n"


@pytest.fixture
def module(load):
    return load("library", "sglang_swap")


class Server:
    """A state file of a server that runs nomtp, and the module's arguments."""

    def __init__(self, root):
        self.paths = Paths(str(root), "sglang_gpu0")
        self.paths.make()
        self.runs("nomtp", previous={"profile": "older", "argv": ["old"], "previous": {"profile": "oldest"}})

    def runs(self, profile, **more):
        argv = ["/v/bin/python", "-m", "sglang.launch_server", "--host", "127.0.0.2", "--port", "1"]
        state = {
            "profile": profile, "argv": argv, "env": {"A": "1"}, "launch_sha256": profile,
            "script": f"{self.paths.scripts}/s.sh", "script_text": SCRIPT, "port": 1,
            "launched_in": "r0", "record": {"release": "0.5.17", "model": "q"}, **more,
        }  # fmt: skip
        write_state(self.paths.state, state)

    def args(self, state="looked", **more):
        return {
            "name": "n-gpu0", "slug": "sglang_gpu0", "root": self.paths.root, "state": state,
            "run": "r1", "who": "alice@laptop", **more,
        }  # fmt: skip

    def begin(self, **more):
        wanted = {"profile": "mtp", "argv": ["b"], "env": {}, "port": 2, "record": {"release": "0.5.18", "model": "q"}}
        return self.args("begun", **{"wanted": wanted, **more})

    @property
    def swap(self):
        return read_state(self.paths.swap)

    @property
    def history(self):
        return [json.loads(line) for line in Path(self.paths.history).read_text().splitlines()]


@pytest.fixture
def server(tmp_path):
    return Server(tmp_path / "fleet")


def test_a_look_tells_what_a_failure_would_go_back_to_and_writes_nothing(module, server, call):
    before = sorted(os.walk(server.paths.root))
    answer = call(module, server.args())
    assert (answer["changed"], answer["swap"], answer["running"], answer["brought"]["run"]) == (False, None, None, "r0")
    assert (answer["before"]["profile"], answer["before"]["host"], answer["before"]["script_text"]) == (
        "nomtp",
        "127.0.0.2",
        SCRIPT,
    )
    assert answer["before"]["previous"] == {"profile": "older", "argv": ["old"]}, "one boot is kept along, not a chain"
    assert answer["previous"]["profile"] == "older"
    assert sorted(os.walk(server.paths.root)) == before


def test_what_runs_is_kept_whole_before_anything_is_stopped(module, server, call):
    write_atomic(server.paths.secrets, f'api-key: "{KEY}"\n', 0o600)
    answer = call(module, server.begin(secrets={"api-key": "another"}))
    assert answer["rc"] == 0 and KEY not in json.dumps(answer) and "another" not in json.dumps(answer)
    swap = server.swap
    assert swap["before"]["secrets"] == {"api-key": KEY} and swap["before"]["argv"][0] == "/v/bin/python"
    assert (swap["from"]["profile"], swap["to"]["profile"], swap["to"]["port"], swap["outcome"]) == ("nomtp", "mtp", 2, None)
    assert stat.S_IMODE(os.stat(server.paths.swap).st_mode) == 0o600
    assert stat.S_IMODE(os.stat(server.paths.previous_script).st_mode) == 0o700
    assert Path(server.paths.previous_script).read_text() == SCRIPT
    assert answer["swap"]["run"] == "r1" and "before" not in answer["swap"]


def test_a_swap_over_one_that_was_cut_goes_back_to_what_was_proven(module, server, call):
    call(module, server.begin())
    noted = call(module, server.args("noted", note={"benchmark": [{"output_tok_s": 3}]}))
    assert noted["swap"]["benchmark"] == [{"output_tok_s": 3}]
    server.runs("mtp")
    answer = call(module, {**server.begin(seen="r1"), "run": "r2"})
    assert (answer["rc"], answer["before"]["profile"]) == (0, "nomtp")
    assert server.swap["benchmark"] == [{"output_tok_s": 3}], "measured before the stop: nobody can do it again"


def test_a_swap_that_someone_began_meanwhile_is_not_taken_up(module, server, call):
    call(module, server.begin())
    answer = call(module, {**server.begin(), "run": "r2", "who": "bob@desk"})
    assert "another swap of this server is under way, alice@laptop began one at" in answer["msg"]
    assert server.swap["run"] == "r1"
    ended = call(module, {**server.args("ended", outcome="swapped"), "run": "r2"})
    assert "its swap was taken over by alice@laptop" in ended["msg"]


def test_a_swap_that_is_taken_up_began_and_went_out_when_the_first_did(module, server, call):
    assert call(module, server.begin())["out"] < 60
    hour_ago = {"begun_at": "2026-01-01T00:00:00Z", "out_epoch": time.time() - 3600}
    write_state(server.paths.swap, {**server.swap, **hour_ago})
    server.runs("mtp", launched_at="2026-01-01T00:00:09Z")
    answer = call(module, {**server.begin(seen="r1"), "run": "r2"})
    assert 3600 <= answer["out"] < 3700
    assert (server.swap["begun_at"], server.swap["run"]) == (hour_ago["begun_at"], "r2") and server.swap["taken_up_at"]
    other = call(module, {**server.begin(), "run": "r3", "who": "bob@desk"})
    assert f"alice@laptop began one at {server.swap['taken_up_at']}" in other["msg"]
    call(module, {**server.args("ended", outcome="swapped"), "run": "r2"})
    assert server.history[0]["begun_at"] == hour_ago["begun_at"]


def test_what_was_never_stopped_was_never_out(module, server, call):
    runs = {"launched_at": "2026-01-01T00:00:00Z", "identity": identity(os.getpid())}
    server.runs("nomtp", log="l", launched_epoch=0, launched_boot_seconds=0, **runs)
    call(module, server.begin())
    write_state(server.paths.swap, {**server.swap, "out_epoch": time.time() - 3600})
    assert call(module, {**server.begin(seen="r1"), "run": "r2"})["out"] < 60


@pytest.mark.parametrize("outcome", ["swapped", "reverted", "kept"])
def test_an_end_closes_it_and_is_remembered(module, server, call, outcome):
    call(module, server.begin())
    answer = call(module, server.args("ended", outcome=outcome, why="because"))
    assert (answer["swap"], server.swap["outcome"]) == (None, outcome)
    (line,) = server.history
    assert {key: line[key] for key in ("server", "what", "who", "run", "why")} == {
        "server": "n-gpu0", "what": outcome, "who": "alice@laptop", "run": "r1", "why": "because",
    }  # fmt: skip
    assert (line["before"]["release"], line["after"]["release"]) == ("0.5.17", "0.5.18")


@pytest.mark.parametrize("outcome", ["lost", "unrouted"])
def test_a_server_that_is_lost_or_not_routed_to_stays_open(module, server, call, outcome):
    call(module, server.begin())
    answer = call(module, server.args("ended", outcome=outcome, why="its node is gone"))
    assert answer["swap"]["outcome"] == outcome
    again = call(module, {**server.begin(seen="r1"), "run": "r2"})
    assert (again["rc"], again["before"]["profile"]) == (0, "nomtp")


def test_a_way_back_to_what_ran_is_called_reverted(module, server, call):
    from ansible.module_utils.sglang_state import launch_sha256

    sha = launch_sha256(["b"], {}, {})
    server.runs("nomtp", launch_sha256=sha)
    call(module, server.begin())
    call(module, server.args("ended", outcome="swapped"))
    assert server.swap["outcome"] == "reverted" and "was cut before" in server.swap["why"]


def test_a_server_whose_script_is_gone_is_not_begun(module, server, call):
    server.runs("nomtp", script_text=None)
    answer = call(module, server.begin())
    assert "can't be kept" in answer["msg"] and "nothing was stopped" in answer["msg"]
    assert server.swap == {}


@pytest.mark.parametrize(
    ("lacks", "what"),
    [
        ({"from": None}, "its from is missing"),
        ({"before": {}}, "in its before, its profile is missing"),
        ({"out_epoch": "noon"}, "its out_epoch is str"),
        ({"before": {**begun()["before"], "argv": []}}, "in its before, its argv is no command line"),
        ({"before": {**begun()["before"], "record": {"flags": 7}}}, "in its before, its flags are no list of flags"),
        ({"to": ["mtp"]}, "its to is list"),
    ],
)
def test_a_damaged_record_is_told_and_a_swap_begins_anew(module, server, call, warned, lacks, what):
    write_state(server.paths.swap, {**begun(), **lacks})
    looked = call(module, server.args())
    assert (looked["rc"], looked["swap"], looked["before"]["profile"]) == (0, None, "nomtp")
    assert warned == [
        f"n-gpu0: {server.paths.swap} is damaged, {what}: it is taken as absent; status.yml tells what its server runs,"
        " history.yml what was changed before, and the next swap of it writes it anew"
    ]
    assert "its swap was taken over" in call(module, server.args("ended", outcome="swapped"))["msg"]
    again = call(module, server.begin())
    assert (again["rc"], server.swap["before"]["profile"], server.swap["run"]) == (0, "nomtp", "r1")


def test_check_mode_writes_nothing(module, server, call):
    answer = call(module, server.begin(), check=True)
    assert (answer["rc"], server.swap, os.path.exists(server.paths.previous_script)) == (0, {}, False)


def test_a_folder_that_takes_nothing_is_an_error_in_one_sentence(module, server, call):
    os.rename(server.paths.run, server.paths.run + ".away")
    Path(server.paths.run).touch()
    answer = call(module, server.begin())
    assert answer["rc"] == 1 and "free space there" in answer["msg"]


def flags(*words, port=1, env=None, **more):
    record = {"release": "0.5.17", "model": "q", "flags": [["--port", str(port)], *([word] for word in words)]}
    return {
        "record": {**record, **more},
        "env": {"SGLANG_FLEET_SERVER": f"n-{port}", "CUDA_VISIBLE_DEVICES": str(port), **(env or {})},
    }


@pytest.mark.parametrize(
    ("before", "after", "what"),
    [
        (flags("--a"), flags("--a", port=2), None),
        (flags("--a"), flags("--a", release="0.5.18"), "nomtp, 0.5.18, q"),
        (flags("--a"), flags("--b", model="r"), "nomtp, 0.5.17, r"),
    ],
)
def test_a_change_is_known_by_what_it_brought(module, server, call, before, after, what):
    server.runs("nomtp", **after, previous={"profile": "nomtp", "argv": ["old"], "port": 1, **before})
    assert call(module, server.args())["brought"] == {"run": "r0", "what": what}


def test_other_flags_are_known_on_every_server_and_their_own_do_not_count(module, server, call):
    def what(before, after):
        server.runs("nomtp", **after, previous={"profile": "nomtp", "argv": ["old"], "port": 1, **before})
        return call(module, server.args())["brought"]["what"]

    assert what(flags("--a"), flags("--b")) == what(flags("--c", port=7), flags("--b", port=7)) is not None
    assert what(flags("--a"), flags("--b")) != what(flags("--a"), flags("--c"))
    assert what(flags("--a"), flags("--a", env={"X": "1"})) not in (None, what(flags("--a"), flags("--b")))
    # Of an open swap: what it was to bring.
    server.runs("nomtp", **flags("--a"))
    wanted = {"profile": "nomtp", "argv": ["b"], "port": 1, **flags("--b")}
    open_one = call(module, server.begin(wanted=wanted, changes=["b: unset -> set"]))["brought"]
    assert open_one == {"run": "r1", "what": what(flags("--a"), flags("--b"))}
    call(module, server.args("ended", outcome="swapped"))
    assert server.history[-1]["changes"] == ["b: unset -> set"]
