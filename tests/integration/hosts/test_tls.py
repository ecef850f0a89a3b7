"""Services speak TLS: real processes, certificates of a private authority, and what each side refuses."""

import ssl
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import httpx
import numpy as np
import pytest

from refitd_client import RefitClient, ServiceProblemError, ServiceUnreachableError, WeightPublisher
from refitd_client.http.connection import ClientTls
from refitd_client.http.exchange import RetryPolicy
from support.certificates import Authority, Pair
from support.checkpoints import Tensors, tensors, write_model
from support.hosts import QUICK, RUN, Host, until
from support.scripted_sglang import scripted_sglang
from support.servers import RefitdServer

ONCE = RetryPolicy(deadline=0.0)


class SecureServer(RefitdServer):
    """`refitd serve` with a certificate."""

    @property
    def url(self) -> str:
        return f"https://127.0.0.1:{self.port}"


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "certificates")


@contextmanager
def identity(authority: Authority | None, pair: Pair | None = None) -> Generator[None]:
    """What this process trusts and shows, as the environment says it."""
    files = {
        "REFITD_CA_FILE": None if authority is None else authority.file,
        "REFITD_CLIENT_CERT": None if pair is None else pair.cert,
        "REFITD_CLIENT_KEY": None if pair is None else pair.key,
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, file in files.items():
            if file is not None:
                patch.setenv(name, str(file))
        yield


@contextmanager
def secure(tmp_path: Path, *flags: str, base: Tensors | None = None) -> Generator[Host]:
    """A service with a certificate and one engine."""
    (tmp_path / "hub/root").mkdir(parents=True)
    model = write_model(tmp_path / "base", base)
    with scripted_sglang() as engine:
        server = SecureServer(
            tmp_path / "hub", tmp_path / "hub/root", [engine.url], *QUICK, "--base-model", str(model), *flags
        )
        with server:
            yield Host("hub", tmp_path / "hub", server, [engine])


@contextmanager
def asking(url: str, authority: Authority, pair: Pair | None = None) -> Generator[RefitClient]:
    """A client that trusts an authority, and shows a certificate. It asks once."""
    with identity(authority, pair), RefitClient(url, retry=ONCE) as client:
        yield client


def raw(host: Host, context: ssl.SSLContext, path: str) -> httpx.Response:
    """Ask without the SDK."""
    return httpx.get(f"{host.refitd.url}{path}", verify=context, trust_env=False, timeout=30)


def shown(host: Host, authority: Authority) -> str:
    """The serial number of the certificate that a new connection is shown."""
    context = ClientTls(ca_file=authority.file).context()
    with (
        httpx.Client(verify=context, trust_env=False) as client,
        client.stream("GET", f"{host.refitd.url}/healthz") as answer,
    ):
        return answer.extensions["network_stream"].get_extra_info("ssl_object").getpeercert()["serialNumber"]


def test_a_service_with_a_certificate_refuses_plain_http_and_old_tls(tmp_path: Path, authority: Authority) -> None:
    with secure(tmp_path, *authority.issue("hub").as_server) as hub:
        with pytest.raises(httpx.TransportError):
            httpx.get(f"http://127.0.0.1:{hub.refitd.port}/healthz", trust_env=False)
        old = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        old.load_verify_locations(authority.file)
        old.set_ciphers("DEFAULT@SECLEVEL=0")
        with pytest.warns(DeprecationWarning, match="TLSv1_1"):
            old.maximum_version = ssl.TLSVersion.TLSv1_1
        with pytest.raises(httpx.ConnectError):
            raw(hub, old, "/healthz")
        assert raw(hub, ClientTls(ca_file=authority.file).context(), "/healthz").status_code == 200


def test_a_certificate_of_another_authority_or_for_another_name_is_refused_in_a_sentence(
    tmp_path: Path, authority: Authority
) -> None:
    other = Authority(tmp_path / "other")
    with secure(tmp_path, *authority.issue("hub", names="DNS:hub.example,IP:127.0.0.1").as_server) as hub:
        with (
            asking(hub.refitd.url, other) as client,
            pytest.raises(ServiceUnreachableError, match=r"not from an authority.*REFITD_CA_FILE"),
        ):
            client.overview()
        with (
            asking(f"https://localhost:{hub.refitd.port}", authority) as client,
            pytest.raises(ServiceUnreachableError, match="its certificate is for other names"),
        ):
            client.overview()
        with asking(hub.refitd.url, authority) as client:
            assert client.healthy()


def test_under_mtls_a_client_without_a_certificate_gets_health_alone_and_one_of_another_authority_nothing(
    tmp_path: Path, authority: Authority
) -> None:
    other = Authority(tmp_path / "other").issue("stranger")
    flags = (*authority.issue("hub").as_server, "--tls-client-ca", str(authority.file))
    with secure(tmp_path, *flags) as hub:
        with asking(hub.refitd.url, authority) as client:
            assert client.healthy()
            with pytest.raises(ServiceProblemError, match="REFITD_CLIENT_CERT") as caught:
                client.overview()
            assert caught.value.problem.slug == "no-certificate"
        with asking(hub.refitd.url, authority, other) as client:
            with pytest.raises(ServiceUnreachableError):
                client.overview()
            assert not client.healthy()
        with asking(hub.refitd.url, authority, authority.issue("trainer")) as client:
            assert client.overview().engines


def test_a_new_certificate_is_shown_while_a_download_goes_on_and_a_broken_one_changes_nothing(
    tmp_path: Path, authority: Authority
) -> None:
    pair = authority.issue("hub")
    weights = {"weight": np.arange(2**23, dtype=np.float32)}  # more than all buffers on the way hold
    with secure(tmp_path, *pair.as_server, base=weights) as hub, identity(authority):
        with WeightPublisher(hub.root, RUN, hub.refitd.url) as publisher:
            version = publisher.publish(weights, step=1).version_id
        until(lambda: hub.serves(1), hub)
        before, context = shown(hub, authority), ClientTls(ca_file=authority.file).context()
        name = "model-00001-of-00001.safetensors"
        url = f"{hub.refitd.url}/v1/versions/{version}/files/{name}"
        with httpx.Client(verify=context, trust_env=False) as client, client.stream("GET", url) as download:
            chunks = download.iter_bytes(2**16)
            data = next(chunks)
            pair.put(authority.issue("renewed"))
            until(lambda: shown(hub, authority) != before, hub)
            renewed = shown(hub, authority)
            data += b"".join(chunks)
        assert data == (hub.root / RUN / "v000001" / name).read_bytes()
        pair.key.write_text("no key")
        with RefitClient(hub.refitd.url) as client:
            until(lambda: client.overview().faults.tls is not None, hub)
            assert "connections get the certificate that was read before" in (client.overview().faults.tls or "")
            assert shown(hub, authority) == renewed
            pair.put(authority.issue("mended"))
            until(lambda: client.overview().faults.tls is None, hub)
        assert shown(hub, authority) != renewed


def test_a_follower_and_its_hub_prove_themselves_to_each_other_by_certificates(
    tmp_path: Path, authority: Authority
) -> None:
    flags = (*authority.issue("hub").as_server, "--tls-client-ca", str(authority.file))
    one = authority.issue("one")
    with secure(tmp_path, *flags) as hub, scripted_sglang() as engine, identity(authority, authority.issue("trainer")):
        root = tmp_path / "one/root"
        root.mkdir(parents=True)
        follows = ("--follow", hub.refitd.url, *authority.trusted, *one.as_client, *one.as_server)
        server = SecureServer(root.parent, root, [engine.url], *QUICK, "--base-model", str(tmp_path / "base"), *follows)
        with server:
            follower = Host("one", root.parent, server, [engine])
            with WeightPublisher(hub.root, RUN, hub.refitd.url) as publisher:
                version = publisher.publish(tensors(1), step=1)
                assert version.wait(60).engines
                until(lambda: follower.serves(1), hub, follower)
                pulled = root / RUN / "v000001/model-00001-of-00001.safetensors"
                assert pulled.read_bytes() == (hub.root / RUN / "v000001" / pulled.name).read_bytes()
