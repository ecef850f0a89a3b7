"""The files for TLS: what of them is refused, when a certificate expires, and when they are read again."""

from pathlib import Path

import pytest

from refitd.api.options import AccessSettings, ServerTls, TlsFiles
from refitd.settings import Settings
from refitd_client.http.connection import ClientTls
from support.certificates import Authority

DAY = 86400.0


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


def test_a_broken_pair_keeps_what_was_read_before_and_says_so_until_it_is_mended(authority: Authority) -> None:
    pair = authority.issue("hub")
    tls = ServerTls(TlsFiles(cert=pair.cert, key=pair.key))
    before = tls._now
    pair.cert.write_bytes(authority.issue("other").cert.read_bytes())
    tls.look()
    assert tls._now is before
    assert "does not belong to the certificate" in (tls.fault or "")
    pair.put(authority.issue("renewed"))
    tls.look()
    assert tls._now is not before
    assert tls.fault is None


def test_a_key_with_a_password_is_refused_and_nobody_is_asked_for_it(authority: Authority, tmp_path: Path) -> None:
    pair = authority.issue("hub")
    pair.key.write_text("-----BEGIN ENCRYPTED PRIVATE KEY-----\nMIIB\n-----END ENCRYPTED PRIVATE KEY-----\n")
    with pytest.raises(ValueError, match=r"is encrypted|hold no certificate"):
        TlsFiles(cert=pair.cert, key=pair.key).context()
    with pytest.raises(ValueError, match="holds no certificate in PEM form"):
        ClientTls(ca_file=pair.key).context()


@pytest.mark.parametrize("given", [{"tls_cert"}, {"tls_key"}, {"tls_client_ca"}, {"client_cert"}, {"client_key"}])
def test_half_of_a_pair_is_refused(given: set[str], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"needs --\w+-\w+ as well"):
        Settings(root=tmp_path, **dict.fromkeys(given, tmp_path / "file"))


def test_no_setting_turns_verification_off() -> None:
    assert not [name for name in AccessSettings.model_fields if "verify" in name or name == "tls_insecure"]


def test_a_client_reads_replaced_files_again_and_keeps_the_old_ones_while_they_do_not_fit(
    authority: Authority,
) -> None:
    pair = authority.issue("trainer")
    tls = ClientTls(ca_file=authority.file, cert=pair.cert, key=pair.key)
    first = tls.context()
    assert tls.context() is first
    pair.key.write_text("no key")
    assert tls.context() is first
    pair.put(authority.issue("renewed"))
    assert tls.context() is not first
