"""What SQLite asks of the file system, recorded: writes, truncations, syncs and deletions, in order, with the bytes.

SQLite reaches files through a table of functions, its VFS (https://sqlite.org/vfs.html). A copy of the default one is
registered here whose files write things down before they do them. It is put into the very library that Python's
`sqlite3` has loaded, so the journal under test runs as it is, with its own SQL, pragmas and threads.

`sqlite3.xSync` of a write-ahead log also syncs the folder when the log was just made (os_unix.c, UNIXFILE_DIRSYNC),
and a deletion says by an argument whether the folder is to be synced. No other name changes.
"""

import ctypes
from collections.abc import Generator
from contextlib import contextmanager
from ctypes import CFUNCTYPE, POINTER, c_char_p, c_int, c_int64, c_void_p
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Opened:
    """A file was opened, and made if it was not there."""

    file: str


@dataclass(frozen=True, slots=True)
class Written:
    """Bytes were written, and are not on the disk yet."""

    file: str
    offset: int
    data: bytes


@dataclass(frozen=True, slots=True)
class Truncated:
    """A file was made shorter."""

    file: str
    size: int


@dataclass(frozen=True, slots=True)
class Synced:
    """All that was written to a file before is on the disk."""

    file: str


@dataclass(frozen=True, slots=True)
class Deleted:
    """A name was removed. `synced`: and the folder was synced."""

    file: str
    synced: bool


@dataclass(frozen=True, slots=True)
class Said:
    """Not SQLite's: somebody was told that the first `count` facts are durable."""

    count: int


Effect = Opened | Written | Truncated | Synced | Deleted | Said

_OPEN = CFUNCTYPE(c_int, c_void_p, c_void_p, c_void_p, c_int, c_void_p)  # the name stays SQLite's: files keep it
_DELETE = CFUNCTYPE(c_int, c_void_p, c_char_p, c_int)
_WRITE = CFUNCTYPE(c_int, c_void_p, c_void_p, c_int, c_int64)
_TRUNCATE = CFUNCTYPE(c_int, c_void_p, c_int64)
_SYNC = CFUNCTYPE(c_int, c_void_p, c_int)


class _Vfs(ctypes.Structure):
    """struct sqlite3_vfs, up to the functions that are replaced."""

    _fields_ = (
        ("version", c_int),
        ("file_size", c_int),
        ("longest_path", c_int),
        ("next", c_void_p),
        ("name", c_char_p),
        ("data", c_void_p),
        ("open", c_void_p),
        ("delete", c_void_p),
        ("others", c_void_p * 13),
    )


class _Methods(ctypes.Structure):
    """struct sqlite3_io_methods."""

    _fields_ = (
        ("version", c_int),
        ("close", c_void_p),
        ("read", c_void_p),
        ("write", c_void_p),
        ("truncate", c_void_p),
        ("sync", c_void_p),
        ("others", c_void_p * 13),
    )


class _File(ctypes.Structure):
    """struct sqlite3_file: what SQLite holds of an open file begins with its table of functions."""

    _fields_ = (("methods", POINTER(_Methods)),)


class Recorder:
    """A VFS that appends to `effects`. It must outlive every connection that was opened through it."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.effects: list[Effect] = []
        self._library = library
        self._names: dict[int, str] = {}
        self._tables: dict[int, _Methods] = {}
        self._kept: list[object] = []
        library.sqlite3_vfs_find.restype = POINTER(_Vfs)
        self._default = library.sqlite3_vfs_find(None)
        self._vfs = _Vfs.from_buffer_copy(self._default.contents)
        self._vfs.name = b"recorder"
        self._vfs.open = self._callback(_OPEN(self._open))
        self._vfs.delete = self._callback(_DELETE(self._delete))

    def start(self) -> None:
        """Have every connection that is opened from now on recorded."""
        self._library.sqlite3_vfs_register(ctypes.byref(self._vfs), 1)

    def stop(self) -> None:
        """No new ones."""
        self._library.sqlite3_vfs_unregister(ctypes.byref(self._vfs))
        self._library.sqlite3_vfs_register(self._default, 1)

    def _callback(self, function: object) -> int | None:
        self._kept.append(function)
        return ctypes.cast(function, c_void_p).value  # pyright: ignore[reportArgumentType]

    def _open(self, _: int, name: int | None, file: int, flags: int, out: int) -> int:
        code = _OPEN(self._default.contents.open)(self._default, name, file, flags, out)
        if code == 0 and name is not None:
            self._names[file] = Path(ctypes.string_at(name).decode()).name
            self.effects.append(Opened(self._names[file]))
            self._swap(_File.from_address(file))
        return code

    def _swap(self, file: _File) -> None:
        address = ctypes.addressof(file.methods.contents)
        if address not in self._tables:
            table = self._tables[address] = _Methods.from_buffer_copy(file.methods.contents)
            write, truncate, sync = _WRITE(table.write), _TRUNCATE(table.truncate), _SYNC(table.sync)
            table.write = self._callback(_WRITE(lambda *args: self._write(write, *args)))
            table.truncate = self._callback(_TRUNCATE(lambda *args: self._truncate(truncate, *args)))
            table.sync = self._callback(_SYNC(lambda *args: self._sync(sync, *args)))
        file.methods = ctypes.pointer(self._tables[address])

    def _delete(self, _: int, name: bytes, sync_folder: int) -> int:
        code = _DELETE(self._default.contents.delete)(self._default, name, sync_folder)
        if code == 0:
            self.effects.append(Deleted(Path(name.decode()).name, synced=bool(sync_folder)))
        return code

    def _write(self, original: "ctypes._FuncPointer", file: int, data: int, size: int, offset: int) -> int:
        self.effects.append(Written(self._names[file], offset, ctypes.string_at(data, size)))
        return original(file, data, size, offset)

    def _truncate(self, original: "ctypes._FuncPointer", file: int, size: int) -> int:
        self.effects.append(Truncated(self._names[file], size))
        return original(file, size)

    def _sync(self, original: "ctypes._FuncPointer", file: int, flags: int) -> int:
        code = original(file, flags)
        self.effects.append(Synced(self._names[file]))
        return code


def sqlite_library() -> ctypes.CDLL | None:
    """The library that `sqlite3` runs on; None where it is built in and shows no names."""
    import _sqlite3

    library = ctypes.CDLL(getattr(_sqlite3, "__file__", None))
    return library if hasattr(library, "sqlite3_vfs_register") else None


@contextmanager
def recording(library: ctypes.CDLL) -> Generator[Recorder]:
    """Record what connections do that are opened in this block."""
    recorder = Recorder(library)
    recorder.start()
    try:
        yield recorder
    finally:
        recorder.stop()
