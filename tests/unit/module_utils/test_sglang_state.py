# Copyright: sglang-fleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""State files, locks and the figure that tells whether a restart is needed."""

from __future__ import annotations

import errno
import json
import os
import signal
import stat
import sys
import threading

import pytest
from ansible.module_utils import sglang_state
from ansible.module_utils.sglang_state import (
    Busy,
    Paths,
    boot_of,
    launch_sha256,
    link_atomic,
    load_state,
    lock,
    new_log,
    read_secrets,
    read_state,
    read_text,
    remember,
    rewrite_state,
    write_atomic,
    write_state,
)


def mode(path):
    return stat.S_IMODE(os.stat(path).st_mode)


def test_the_files_of_a_server(tmp_path):
    paths = Paths("/srv/sglang", "sglang_gpu0")
    assert vars(paths) == {
        "root": "/srv/sglang",
        "scripts": "/srv/sglang/scripts",
        "logs": "/srv/sglang/logs/sglang_gpu0",
        "newest_log": "/srv/sglang/logs/sglang_gpu0.log",
        "run": "/srv/sglang/run",
        "cache": "/srv/sglang/cache",
        "state": "/srv/sglang/run/sglang_gpu0.json",
        "lock": "/srv/sglang/run/sglang_gpu0.lock",
        "secrets": "/srv/sglang/run/sglang_gpu0.secrets.yml",
        "bundles": "/srv/sglang/bundles/sglang_gpu0",
        "swap": "/srv/sglang/run/sglang_gpu0.swap.json",
        "history": "/srv/sglang/history/sglang_gpu0.jsonl",
        "previous_script": "/srv/sglang/scripts/start_sglang_gpu0_previous.sh",
    }
    here = Paths(str(tmp_path / "new"), "s")
    here.make()
    here.make()
    assert all(os.path.isdir(folder) for folder in (here.scripts, here.logs, here.run, here.cache))


def test_a_reader_never_sees_half_a_file(tmp_path):
    path = tmp_path / "state.json"
    texts = {letter * 200_000 for letter in "ab"}
    write_atomic(path, "a" * 200_000, 0o644)
    done = threading.Event()

    def write():
        for _ in range(30):
            for text in texts:
                write_atomic(path, text, 0o644)
        done.set()

    writer = threading.Thread(target=write)
    writer.start()
    looks = 0
    while not done.is_set():
        assert path.read_text() in texts
        looks += 1
    writer.join()
    assert looks > 10
    assert os.listdir(tmp_path) == ["state.json"]


def test_a_failed_write_keeps_the_old_file_and_leaves_nothing(tmp_path, monkeypatch):
    path = tmp_path / "state.json"
    write_atomic(path, "old", 0o644)
    with pytest.raises(UnicodeEncodeError):
        write_atomic(path, "half \udcff", 0o644)

    def full(_descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_atomic(path, "new", 0o644)
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["state.json"]


def test_a_file_has_its_mode_whatever_the_umask(tmp_path):
    before = os.umask(0o077)
    try:
        write_atomic(tmp_path / "open", "x", 0o644)
        write_atomic(tmp_path / "script", "x", 0o755)
    finally:
        os.umask(before)
    write_atomic(tmp_path / "secret", "x", 0o600)
    assert [mode(tmp_path / name) for name in ("open", "script", "secret")] == [0o644, 0o755, 0o600]


def test_a_link_is_replaced(tmp_path):
    link = tmp_path / "newest.log"
    link_atomic("a.log", str(link))
    link_atomic("b.log", str(link))
    assert os.readlink(link) == "b.log"
    assert os.listdir(tmp_path) == ["newest.log"]


def test_a_state_comes_back_as_it_was_written(tmp_path):
    path = tmp_path / "state.json"
    write_state(path, {"name": "n-gpu0", "env": {"A": "é"}})
    assert read_state(path) == {"schema": 1, "name": "n-gpu0", "env": {"A": "é"}}
    assert mode(path) == 0o600


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (b"", "it is empty or cut short"),
        (b"{", "it is no JSON"),
        (b"garbage", "it is no JSON"),
        (b"\xff\xfe\x00", "it is no JSON"),
        (b'"text"', "it holds str"),
        (b"[1]", "it holds list"),
        (b"null", "it holds NoneType"),
        (b'{"a": 1', "it is no JSON"),
        (b'{"identity": "4711"}', "its identity is str"),
        (b'{"identity": {"pid": 1, "boot_id": "b", "sid": 1}}', "its identity has no start_ticks"),
        (b'{"log": ["x"]}', "its log is list"),
        (b'{"previous": "nomtp"}', "its previous is str"),
        (b'{"previous": {"env": 7}}', "in its previous, its env is int"),
        (b'{"previous": {"record": {"flags": 7}}}', "in its previous, its flags are no list of flags"),
        (b'{"argv": []}', "its argv is no command line"),
        (b'{"argv": [7]}', "its argv is no command line"),
        (b'{"env": {"A": 1}}', "its env has a value that is no text"),
        (b'{"record": {"flags": 7}}', "its flags are no list of flags"),
        (b'{"record": {"flags": ["--a"]}}', "its flags are no list of flags"),
        (b'{"identity": {"pid": 1, "start_ticks": 1, "boot_id": "b", "sid": 1}, "log": "/l"}', "its port is missing"),
    ],
)
def test_a_damaged_state_file_is_empty_and_says_why_and_what_to_do(tmp_path, text, problem):
    path = tmp_path / "state.json"
    path.write_bytes(text)
    state, damage = load_state(path)
    assert (state, read_state(path)) == ({}, {})
    assert damage.startswith(f"{path} is damaged, {problem}")
    assert "stop.yml" in damage and "deploy.yml" in damage


@pytest.mark.parametrize(("schema", "shown"), [(99, "99"), (None, "null"), ("x" * 99, '"' + "x" * 39)])
def test_a_state_file_of_another_schema_tells_which_and_is_taken_as_absent(tmp_path, schema, shown):
    path = tmp_path / "state.json"
    path.write_text(json.dumps({"schema": schema, "log": ["of another shape"]}))
    state, damage = load_state(path)
    assert state == {}
    assert damage.startswith(f"{path} is of another release of this project (found schema {shown}, expected 1): ")
    assert "stop.yml" in damage and "deploy.yml" in damage


@pytest.fixture
def full_disk(monkeypatch):
    """A disk that takes no new file; what is there can be written over."""

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    return lambda: monkeypatch.setattr(sglang_state, "write_atomic", full)


def test_on_a_full_disk_a_state_is_written_over_the_old_one(tmp_path, full_disk):
    path = tmp_path / "state.json"
    old = {"name": "n-gpu0", "argv": ["a"] * 30}
    write_state(path, old)
    before = os.stat(path)
    full_disk()
    rewrite_state(path, {**old, "stopped_at": "then"})
    assert load_state(path) == ({"schema": 1, **old, "stopped_at": "then"}, None)
    after = os.stat(path)
    assert (after.st_ino, after.st_size) == (before.st_ino, before.st_size)


def test_on_a_full_disk_what_has_no_room_leaves_the_old_state(tmp_path, full_disk):
    path = tmp_path / "state.json"
    write_state(path, {"name": "n-gpu0"})
    full_disk()
    with pytest.raises(OSError, match="No space left") as refused:
        rewrite_state(path, {"name": "n-gpu0", "why": "long" * 99})
    assert refused.value.errno == errno.ENOSPC
    assert read_state(path) == {"schema": 1, "name": "n-gpu0"}


def test_what_a_disk_took_in_part_is_put_back(tmp_path, full_disk, monkeypatch):
    """A file system that copies what it writes over can be full in the middle of it."""
    path, pwrite, sizes = tmp_path / "state.json", os.pwrite, [20]
    old = {"name": "n-gpu0", "argv": ["a"] * 30}
    write_state(path, old)
    full_disk()
    monkeypatch.setattr(os, "pwrite", lambda handle, data, at: pwrite(handle, data[: sizes.pop() if sizes else None], at))
    with pytest.raises(OSError, match="No space left"):
        rewrite_state(path, {**old, "stopped_at": "then"})
    assert (sizes, read_state(path)) == ([], {"schema": 1, **old})


def test_a_state_file_cut_anywhere_is_whole_or_damaged(tmp_path):
    path = tmp_path / "state.json"
    whole = {"name": "n-gpu0", "log": "/l", "argv": ["a"], "record": {"flags": [["--a", "1"]]}}
    write_state(path, whole)
    text = path.read_bytes()
    for cut in range(len(text) - 1):
        path.write_bytes(text[:cut])
        state, damage = load_state(path)
        assert (state, bool(damage)) == ({}, True)


def test_what_is_no_file_says_what_it_is_and_to_move_it_away(tmp_path):
    folder, loop, below = tmp_path / "folder", tmp_path / "loop", tmp_path / "file" / "state.json"
    folder.mkdir()
    loop.symlink_to(loop)
    below.parent.touch()
    keeps = "and the fleet keeps a file there: move it away"
    assert load_state(folder) == ({}, f"{folder} is a folder {keeps}")
    assert load_state(loop) == ({}, f"{loop} is a link that leads back to itself {keeps}")
    part = "a part of its path is a file and no folder: move that file away"
    assert load_state(below) == ({}, f"{below} can't be there, since {part}")


@pytest.mark.parametrize(
    ("number", "what"),
    [
        (errno.EACCES, "(Permission denied): give this user the right to read it"),
        (errno.EIO, "(Input/output error): look at the disk that it is on"),
    ],
)
def test_a_state_file_that_cannot_be_read_says_why(tmp_path, monkeypatch, number, what):
    def refuse(path):
        raise OSError(number, os.strerror(number), path)

    monkeypatch.setattr(sglang_state, "read_text", refuse)
    assert load_state(tmp_path / "s") == ({}, f"{tmp_path / 's'} can't be read {what}")


def test_no_state_file_is_no_damage(tmp_path):
    assert load_state(tmp_path / "none") == ({}, None)


def test_keys_come_back_and_a_damaged_file_of_them_is_none(tmp_path):
    paths = Paths(str(tmp_path), "s")
    paths.make()
    assert read_secrets(paths) == {}
    write_atomic(paths.secrets, 'admin-api-key: "a: b"\napi-key: "k"\n', 0o600)
    assert read_secrets(paths) == {"admin-api-key": "a: b", "api-key": "k"}
    for text in (b'api-key: "k', b"\xff: 1", b"api-key: 5\n"):
        (tmp_path / "run" / "s.secrets.yml").write_bytes(text)
        assert read_secrets(paths) == {}


def test_text_of_a_file_that_is_not_there(tmp_path):
    assert read_text(tmp_path / "none") is None


def test_a_log_has_a_name_of_its_own(tmp_path, monkeypatch):
    monkeypatch.setattr(sglang_state.time, "strftime", lambda *_: "20260101T000000Z")
    paths = Paths(str(tmp_path), "s")
    paths.make()
    names = []
    for _ in range(3):
        path = new_log(paths)
        open(path, "x").close()
        names.append(os.path.basename(path))
    assert names == ["20260101T000000Z.log", "20260101T000000Z-1.log", "20260101T000000Z-2.log"]


LAUNCH = (["/venv/python", "-m", "x", "--a", "1"], {"A": "1", "B": "2"}, {"api-key": "k"})


def test_the_figure_of_a_launch_does_not_depend_on_order():
    argv, env, secrets = LAUNCH
    assert launch_sha256(argv, env, secrets) == launch_sha256(tuple(argv), dict(reversed(env.items())), secrets)
    assert len(launch_sha256(*LAUNCH)) == 64


@pytest.mark.parametrize(
    "other",
    [
        ([*LAUNCH[0], "--b"], LAUNCH[1], LAUNCH[2]),
        (["/other/python", *LAUNCH[0][1:]], LAUNCH[1], LAUNCH[2]),
        ([*LAUNCH[0][:3], "1", "--a"], LAUNCH[1], LAUNCH[2]),
        (["/venv/python", "-m", "x", "--a 1"], LAUNCH[1], LAUNCH[2]),
        (LAUNCH[0], {"A": "1", "B": "3"}, LAUNCH[2]),
        (LAUNCH[0], {"A": "1"}, LAUNCH[2]),
        (LAUNCH[0], LAUNCH[1], {"api-key": "other"}),
        (LAUNCH[0], LAUNCH[1], {}),
    ],
)
def test_the_figure_changes_with_each_part(other):
    assert launch_sha256(*other) != launch_sha256(*LAUNCH)


def test_a_lock_names_its_holder_and_is_free_afterwards(tmp_path):
    path = tmp_path / "s.lock"
    with lock(path, "alice@laptop", 0):
        with pytest.raises(Busy) as busy, lock(path, "bob@desk", 0.3):
            pass
        assert str(busy.value).startswith(f"alice@laptop, pid {os.getpid()}, since 20")
    with lock(path, "bob@desk", 0):
        assert path.read_text().startswith("bob@desk, pid ")
        assert "alice" not in path.read_text()


@pytest.mark.parametrize("text", [b"garbage", b"\xff\xfe", b"g" * 999, b"two\nlines, pid 5, since then"])
def test_a_damaged_lock_file_is_told_with_its_path_and_a_way_on(tmp_path, text):
    path = tmp_path / "s.lock"
    with lock(path, "alice@laptop", 0):
        path.write_bytes(text)
        with pytest.raises(Busy) as busy, lock(path, "bob@desk", 0):
            pass
    shown = text.decode("utf-8", "replace")[:40]
    assert str(busy.value) == (
        f"an unnamed process (its lock file {path} is damaged, it holds {shown!r}; fuser {path} shows the process)"
    )
    with lock(path, "bob@desk", 0):
        assert path.read_text().startswith("bob@desk, pid ")


def test_a_lock_is_given_back_when_the_work_fails(tmp_path):
    path = tmp_path / "s.lock"
    with pytest.raises(KeyError), lock(path, "alice", 0):
        raise KeyError("work")
    with lock(path, "bob", 0):
        assert path.read_text().startswith("bob,")


def test_the_lock_of_a_killed_holder_is_free(tmp_path, python):
    path = tmp_path / "s.lock"
    script = (
        "import sys, time, ansible.module_utils as m; m.__path__.append(sys.argv[1]);"
        "from ansible.module_utils.sglang_state import lock\n"
        "with lock(sys.argv[2], 'carol', 0): print('held', flush=True); time.sleep(60)"
    )
    process, said = python(script, os.path.dirname(sglang_state.__file__), str(path))
    assert said == "held"
    with pytest.raises(Busy, match=f"^carol, pid {process.pid}, since "), lock(path, "bob", 0):
        pass
    process.send_signal(signal.SIGKILL)
    process.wait(5)
    with lock(path, "bob", 0):
        assert path.read_text().startswith("bob,")


def test_the_state_is_json_that_people_can_read(tmp_path):
    path = tmp_path / "state.json"
    write_state(path, {"b": 1, "a": sys.maxsize})
    assert path.read_text() == json.dumps({"a": sys.maxsize, "b": 1, "schema": 1}, indent=2) + "\n"


def test_a_boot_is_kept_with_its_script_also_from_a_state_file_that_has_none(tmp_path):
    script = tmp_path / "start.sh"
    script.write_text("exec true\n")
    state = {
        "argv": ["p", "-m", "s", "--host", "::1"],
        "script": str(script),
        "previous": {"profile": "a", "previous": {"b": 1}},
    }
    assert (boot_of(state)["script_text"], boot_of(state)["host"]) == ("exec true\n", "::1")
    assert boot_of(state)["previous"] == {"profile": "a"}
    assert boot_of({**state, "script_text": "exec false\n"})["script_text"] == "exec false\n"
    script.unlink()
    assert boot_of(state)["script_text"] is None
    assert boot_of({**state, "argv": ["p"]})["host"] == "127.0.0.1" and boot_of({}) is None


def test_keys_are_read_as_they_were_written(tmp_path):
    paths = Paths(str(tmp_path), "sglang_gpu0")
    paths.make()
    assert read_secrets(paths) == {}
    write_atomic(paths.secrets, 'admin-api-key: "b: c"\napi-key: "a\\"b"\n', 0o600)
    assert read_secrets(paths) == {"admin-api-key": "b: c", "api-key": 'a"b'}


def test_history_that_can_not_be_written_is_no_failure(tmp_path):
    (tmp_path / "history").write_text("a file where a folder should be")
    remember(Paths(str(tmp_path), "sglang_gpu0"), server="n-gpu0", what="started")
