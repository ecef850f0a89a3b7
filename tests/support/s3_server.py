"""A real server with S3's API: Ceph's radosgw, with one monitor and one object store in memory, in a folder.

`tests/s3/install` installs the programs.
"""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

import httpx

from support.s3_bucket import make_bucket
from support.sockets import free_port

KEY, SECRET = "test-key", "hidden-test-secret"
PATIENCE = 60.0
_CONFIG = """
[global]
fsid = {fsid}
auth_cluster_required = cephx
auth_service_required = cephx
auth_client_required = cephx
auth_allow_insecure_global_id_reclaim = false
keyring = {folder}/keyring
mon_host = 127.0.0.1:{mon_port}
public_addr = 127.0.0.1
ms_bind_ipv6 = false
run_dir = {folder}
pid_file = {folder}/$name.pid
admin_socket = {folder}/$name.asok
log_file = {folder}/$name.log
osd_pool_default_size = 1
osd_pool_default_min_size = 1
osd_pool_default_pg_num = 1
osd_pool_default_pgp_num = 1
osd_crush_chooseleaf_type = 0
mon_allow_pool_size_one = true
mon_data = {folder}/mon
mon_data_avail_crit = 0
mon_data_avail_warn = 0
osd_data = {folder}/osd
osd_objectstore = memstore
memstore_device_bytes = 2G
osd_op_num_shards = 1
osd_op_num_threads_per_shard = 1
[client.rgw]
rgw_frontends = beast endpoint=127.0.0.1:{port}
rgw_thread_pool_size = 32
rgw_run_sync_thread = false
rgw_enable_quota_threads = false
"""
_CAPS = {
    "mon.": ("--cap", "mon", "allow *"),
    "client.admin": ("--cap", "mon", "allow *", "--cap", "osd", "allow *"),
    "client.rgw": ("--cap", "mon", "allow rw", "--cap", "osd", "allow rwx"),
    "osd.0": ("--cap", "mon", "allow profile osd", "--cap", "osd", "allow *"),
}


@dataclass(frozen=True)
class S3Server:
    """The server's URL, and the variables by which obstore finds it."""

    url: str

    @property
    def environment(self) -> Mapping[str, str]:
        """For `os.environ`, and for processes."""
        return {
            "AWS_ENDPOINT_URL": self.url,
            "AWS_ACCESS_KEY_ID": KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_REGION": "us-east-1",
        }

    def bucket(self) -> str:
        """Make a bucket; its name."""
        name = f"weights-{uuid4().hex[:12]}"
        make_bucket(self.url, name, KEY, SECRET)
        return name


def missing() -> str | None:
    """Why it cannot be started here, None if it can."""
    lacks = [
        name for name in ("ceph-mon", "ceph-osd", "ceph", "radosgw", "radosgw-admin") if shutil.which(name) is None
    ]
    return f"{', '.join(lacks)} not installed (tests/s3/install)" if lacks else None


@contextmanager
def s3_server(folder: Path) -> Generator[S3Server]:
    """Start it in an empty folder whose path is short: it holds sockets."""
    folder.mkdir(exist_ok=True)
    mon_port, port, fsid, osd = free_port(), free_port(), str(uuid4()), str(uuid4())
    (folder / "mon").mkdir()
    (folder / "osd").mkdir()
    config = folder / "ceph.conf"
    config.write_text(_CONFIG.format(fsid=fsid, folder=folder, mon_port=mon_port, port=port))
    keyring, monmap = str(folder / "keyring"), str(folder / "monmap")
    for name, caps in _CAPS.items():
        create = [] if Path(keyring).exists() else ["-C"]
        _run("ceph-authtool", *create, keyring, "--gen-key", "-n", name, *caps)
    _run("monmaptool", "--create", "--fsid", fsid, "--addv", "a", f"[v2:127.0.0.1:{mon_port}]", monmap)
    ceph = ("-c", str(config))
    _run("ceph-mon", *ceph, "--mkfs", "-i", "a", "--monmap", monmap, "--keyring", keyring)
    servers: list[subprocess.Popen[bytes]] = []

    def start(*words: str) -> None:
        with (folder / f"{words[0]}.out").open("wb") as out:
            servers.append(subprocess.Popen([*words, *ceph, "-f"], stdout=out, stderr=out))

    try:
        start("ceph-mon", "-i", "a")
        _run("ceph", *ceph, "osd", "new", osd)
        _run("ceph-osd", *ceph, "-i", "0", "--mkfs", "--osd-uuid", osd)
        start("ceph-osd", "-i", "0")
        user = ("--uid=test", "--display-name=test", f"--access-key={KEY}", f"--secret={SECRET}")
        _run("radosgw-admin", *ceph, "-n", "client.rgw", "user", "create", *user)
        start("radosgw", "-n", "client.rgw")
        server = S3Server(f"http://127.0.0.1:{port}")
        _await(server.url, folder)
        yield server
    finally:
        for process in reversed(servers):
            process.kill()
        for process in servers:
            process.wait()


def _await(url: str, folder: Path) -> None:
    ends = time.monotonic() + PATIENCE
    while True:
        try:
            httpx.get(url, timeout=5, trust_env=False)
        except httpx.HTTPError:
            logs = [path.read_text(errors="replace")[-500:] for path in folder.glob("*.out")]
            assert time.monotonic() < ends, f"radosgw does not answer: {logs}"
            time.sleep(0.1)
        else:
            return


def _run(*words: str) -> None:
    environment = {**os.environ, "CEPH_ARGS": ""}
    done = subprocess.run(words, capture_output=True, timeout=PATIENCE, env=environment, check=False)
    assert done.returncode == 0, f"{words}: {done.stderr.decode(errors='replace')[-2000:]}"


if __name__ == "__main__":  # python -m support.s3_server FOLDER: for a trial by hand
    with s3_server(Path(sys.argv[1])) as running:
        print(running.environment, running.bucket(), flush=True)
        sys.stdin.read()
