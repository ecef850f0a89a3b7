"""Which NCCL the processes of a broadcast have loaded: ranks of different releases refuse each other."""

import mmap
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from refitd.diagnose.doctor.finding import Check, Finding, Verdict, good
from refitd.diagnose.doctor.processes import PROC, family_of

_NAME = "libnccl.so"
_VERSION = re.compile(rb"NCCL version (\d+\.\d+\.\d+)")  # what the library writes into its log


def nccl_of(pid: int) -> str | None:
    """The release of NCCL that a process or its children have loaded; None where none can be seen."""
    for library in sorted({path for one in family_of(pid) for path in _loaded(one)}):
        if (version := version_of(library)) is not None:
            return version
    return None


def version_of(library: Path) -> str | None:
    """The release that a library says it is, None where it says none."""
    with (
        suppress(OSError, ValueError),  # an empty file cannot be mapped
        library.open("rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content,
    ):
        found = _VERSION.search(content)
        return None if found is None else found[1].decode()
    return None


def _loaded(pid: int) -> Iterator[Path]:
    """The library's files, as this host can open them: beneath the process's own root."""
    with suppress(OSError):
        for line in (PROC / str(pid) / "maps").read_text().splitlines():
            path = line.partition("/")[2]
            if _NAME in path:
                yield PROC / str(pid) / "root" / path


def judge_releases(releases: Mapping[str, str | None]) -> Iterator[Finding]:
    """Whether all that have NCCL loaded have the same. `releases` maps processes to what they have."""
    known = {name: release for name, release in releases.items() if release is not None}
    if len(set(known.values())) > 1:
        told = ", ".join(f"{name} has {release}" for name, release in sorted(known.items()))
        fix = "install one release of nvidia-nccl in both environments: others refuse each other"
        yield Finding(
            check=Check.NCCL, subject="libraries", verdict=Verdict.FAILED, text=f"NCCL differs: {told}", fix=fix
        )
    elif known:
        yield good(Check.NCCL, "libraries", f"NCCL {next(iter(known.values()))} in {', '.join(sorted(known))}")
