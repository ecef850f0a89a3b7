"""What Python may lack is called all the same: the Pythons of uv and conda were built against an older libc."""

import ast
import fcntl
import os
import re
import select
import subprocess
import sys
from pathlib import Path

import pytest

from refitd_client.files import plain_file as linux_calls
from refitd_client.files.plain_file import GET_FILE_LOCK, SET_FILE_LOCK, memory_file, process_descriptor


@pytest.fixture(params=["as it is", "built against an older libc"], autouse=True)
def python(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param != "as it is":
        monkeypatch.delattr(os, "memfd_create")
        monkeypatch.delattr(os, "pidfd_open")


def test_a_file_in_memory_has_its_name_in_proc_and_is_not_inherited() -> None:
    descriptor = memory_file("refitd-test")
    try:
        os.ftruncate(descriptor, 100)
        assert os.fstat(descriptor).st_size == 100
        assert not os.get_inheritable(descriptor)
        assert str(Path(f"/proc/self/fd/{descriptor}").readlink()).startswith("/memfd:refitd-test")
    finally:
        os.close(descriptor)


def test_a_refusal_of_the_kernel_is_an_os_error_with_its_number() -> None:
    with pytest.raises(OSError, match="Invalid argument"):
        memory_file("x" * 300)  # 249 bytes at most
    with pytest.raises(ProcessLookupError):
        process_descriptor(2**22 + 1)


def test_the_end_of_a_process_is_seen_by_its_descriptor() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    descriptor = process_descriptor(child.pid)
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    assert poll.poll(0) == []
    child.communicate(b"\n")
    assert poll.poll(0) != []
    assert not os.get_inheritable(descriptor)
    os.close(descriptor)


def test_constants_that_a_python_may_lack_are_those_of_one_that_has_them() -> None:
    assert (GET_FILE_LOCK, SET_FILE_LOCK) == (fcntl.F_OFD_GETLK, fcntl.F_OFD_SETLK)
    code = (
        "import fcntl, os; del os.O_TMPFILE, fcntl.F_OFD_GETLK, fcntl.F_OFD_SETLK;"
        "from refitd_client.files import plain_file as c; print(c.GET_FILE_LOCK, c.SET_FILE_LOCK)"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.split() == [str(GET_FILE_LOCK), str(SET_FILE_LOCK)]


def test_nothing_else_uses_what_a_python_may_lack() -> None:
    lacked = re.compile(r"\b(memfd_create|pidfd_open|copy_file_range|eventfd|O_TMPFILE|F_OFD_\w+|MFD_\w+)\b")
    package = Path(linux_calls.__file__).parents[2]
    for path in [*package.rglob("*.py"), *(package.parent / "service").rglob("*.py")]:
        named = [each for each in ast.walk(ast.parse(path.read_text())) if isinstance(each, ast.Attribute)]
        used = {each.attr for each in named if lacked.search(each.attr)}
        assert not used or path.name == "plain_file.py", f"{path} uses {used}"
