"""Private folders and socket files: owned by their process, swept when it is gone, never anybody else's."""

import os
import socket
import subprocess
import sys
import tempfile
import threading

import pytest
from deadlines import DEADLINE_S

from quire.ipc.links import paths


@pytest.fixture(autouse=True)
def base(tmp_path, monkeypatch):
    monkeypatch.setattr(paths, "_base_directory", lambda: str(tmp_path))
    yield tmp_path
    paths.remove_private_directories()


def make_socket(path: str) -> socket.socket:
    bound = socket.socket(socket.AF_UNIX)
    bound.bind(path)
    return bound


def test_private_directory_is_private_and_removed_with_its_sockets(base):
    path = paths.private_directory()
    assert os.stat(path).st_mode & 0o777 == 0o700
    make_socket(f"{path}/core").close()
    paths.remove_private_directory(path)
    paths.remove_private_directory(path)
    assert list(base.iterdir()) == []


def test_who_is_about_to_exit_waits_for_a_thread_that_removes_a_directory(base, monkeypatch):
    path, removing, go_on = paths.private_directory(), threading.Event(), threading.Event()
    remove = paths._remove_directory

    def slowly(path: str) -> None:
        removing.set()
        assert go_on.wait(DEADLINE_S)
        remove(path)

    monkeypatch.setattr(paths, "_remove_directory", slowly)
    first = threading.Thread(target=paths.remove_private_directories)
    first.start()
    assert removing.wait(DEADLINE_S)
    second = threading.Thread(target=paths.remove_private_directories)
    second.start()
    second.join(0.1)
    assert second.is_alive() and os.path.exists(path)
    go_on.set()
    first.join(DEADLINE_S), second.join(DEADLINE_S)
    assert not os.path.exists(path)


def test_a_place_where_nothing_can_be_made_is_named_with_what_helps(base, monkeypatch):
    monkeypatch.setattr(paths, "_base_directory", lambda: str(base / "nowhere"))
    with pytest.raises(OSError, match=r"no folder for sockets can be made in .*/nowhere: No such .*; XDG_RUNTIME_DIR names"):
        paths.private_directory()


def test_directories_of_the_living_stay_and_those_of_the_dead_go(base):
    mine = paths.private_directory()
    script = (
        "import sys, os, signal\nfrom quire.ipc.links import paths\n"
        f"paths._base_directory = lambda: {str(base)!r}\n"
        "print(paths.private_directory(), flush=True)\nsys.stdin.read()"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        theirs = other.stdout.readline().decode().strip()
        paths.private_directory()
        assert os.path.exists(mine) and os.path.exists(theirs)
        make_socket(f"{theirs}/core").close()
        other.kill()
        other.wait()
    paths.private_directory()
    assert os.path.exists(mine) and not os.path.exists(theirs)


def test_a_directory_swept_before_it_is_held_is_made_anew(base, monkeypatch):
    """Two processes start together: the sweep of one finds the other's new directory, which nobody holds yet."""
    make, swept = tempfile.mkdtemp, []

    def mkdtemp(**options: str) -> str:
        path = make(**options)
        if not swept:
            swept.append(path)
            os.rmdir(path)
        return path

    monkeypatch.setattr(tempfile, "mkdtemp", mkdtemp)
    path = paths.private_directory()
    assert swept and path != swept[0] and os.path.isdir(path)


def test_what_looks_like_ours_but_holds_files_stays(base):
    folder = base / "quire-ipc-notes"
    folder.mkdir(mode=0o700)
    (folder / "thesis.txt").write_text("precious")
    open_folder = base / "quire-ipc-open"
    open_folder.mkdir(mode=0o755)
    (base / "quire-ipc-file").write_text("x")
    (base / "quire-ipc-link").symlink_to(folder)
    paths.private_directory()
    assert (folder / "thesis.txt").read_text() == "precious"
    assert open_folder.exists() and (base / "quire-ipc-file").exists() and (base / "quire-ipc-link").is_symlink()


def test_private_directory_is_removed_when_the_process_ends(base):
    script = f"from quire.ipc.links import paths\npaths._base_directory = lambda: {str(base)!r}\npaths.private_directory()"
    subprocess.run([sys.executable, "-c", script], check=True, timeout=100)
    assert list(base.iterdir()) == []


def test_stale_socket_is_replaced_and_a_live_one_refused(base):
    path = f"{base}/s"
    live = make_socket(path)
    live.listen(1)
    with pytest.raises(FileExistsError, match="another process listens"), paths.claim_socket_path(path):
        pytest.fail("it is in use")
    live.close()
    with paths.claim_socket_path(path):
        assert not os.path.exists(path)
    with paths.claim_socket_path(path):
        make_socket(path).close()
    assert os.path.exists(path)


def test_other_files_are_never_replaced(base):
    path = base / "data"
    path.write_text("x")
    with pytest.raises(FileExistsError, match="no socket"), paths.claim_socket_path(str(path)):
        pytest.fail("it is a file")
    assert path.read_text() == "x"
    (base / "link").symlink_to(base / "nowhere")
    with pytest.raises(FileExistsError, match="no socket"), paths.claim_socket_path(str(base / "link")):
        pytest.fail("it is a link")


def test_claims_wait_for_each_other(base):
    path, order = f"{base}/s", []
    first_in = threading.Event()

    def second() -> None:
        first_in.wait()
        with paths.claim_socket_path(path):
            order.append("second")

    thread = threading.Thread(target=second, name="test-claim")
    thread.start()
    with paths.claim_socket_path(path):
        first_in.set()
        with pytest.raises(TimeoutError), paths.claim_socket_path(path, timeout_s=0.05):
            pytest.fail("the folder is locked")
        order.append("first")
    thread.join()
    assert order == ["first", "second"]


def test_runtime_directory_is_used_if_it_is_there(monkeypatch, tmp_path):
    monkeypatch.undo()
    for value, expected in (("/nonexistent", "/tmp"), ("", "/tmp"), ("/" + "x" * 80, "/tmp"), ("/var/tmp", "/var/tmp")):
        monkeypatch.setenv("XDG_RUNTIME_DIR", value)
        assert paths._base_directory() == expected
