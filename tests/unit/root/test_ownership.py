"""One service owns a root, and its journal lives where it survives a reboot."""

from pathlib import Path

import pytest

from refitd.root.ownership import StartRefusedError, check_state_folder, owned

MOUNTS = "/dev/vda / ext4 rw 0 0\ntmpfs /dev/shm tmpfs rw 0 0\nserver:/x /mnt/nfs nfs4 rw 0 0\n"


def test_a_root_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StartRefusedError, match="no folder"), owned(tmp_path / "none"):
        pass


@pytest.mark.parametrize("folder", ["/dev/shm/state", "/mnt/nfs/state"])  # noqa: S108 - names in a made-up mount table
def test_a_journal_is_not_put_where_it_would_not_last_without_being_asked(folder: str) -> None:
    with pytest.raises(StartRefusedError, match="--state"):
        check_state_folder(Path(folder), named=False, mounts=MOUNTS)
    check_state_folder(Path(folder), named=True, mounts=MOUNTS)


def test_a_journal_on_a_local_disk_is_fine() -> None:
    check_state_folder(Path("/srv/state"), named=False, mounts=MOUNTS)
