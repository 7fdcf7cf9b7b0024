"""Authentication from kubeconfigs, ServiceAccounts and exec plugins, and the messages when it fails."""

import asyncio
import base64
import os
import ssl
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import orjson
import pytest
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
    load_pem_private_key,
)

from gputile.kube import credentials
from gputile.kube.auth import ClusterAccess, ServerTrust, load
from gputile.kube.credentials import ExecConfig, ExecPlugin, TokenFile
from gputile.model.errors import InputError
from tests.kube.certificates import Authority, Issued

AUTHORITY = Authority()
ME = AUTHORITY.issue("me")
SECRET = "s3cr3t-t0k3n"


def encoded(data: bytes) -> str:
    return base64.b64encode(data).decode()


def config(
    user: Mapping[str, Any] | None = None, cluster: Mapping[str, Any] | None = None, name: str = "main", **top: Any
) -> dict[str, Any]:
    """A kubeconfig of one context, whose server is http://<name>."""
    return {
        "current-context": name,
        "clusters": [{"name": name, "cluster": {"server": f"http://{name}", **(cluster or {})}}],
        "users": [{"name": name, "user": user or {}}],
        "contexts": [{"name": name, "context": {"cluster": name, "user": name}}],
        **top,
    }


def write(path: Path, content: object) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else orjson.dumps(content))  # JSON is YAML
    return str(path)


def headers(access: ClusterAccess) -> dict[str, str]:
    return asyncio.run(access.headers())


# ---- which cluster --------------------------------------------------------------------------------------------------


@pytest.fixture
def pod_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "serviceaccount"
    for name, content in {"ca.crt": AUTHORITY.pem, "token": b"pod-token\n", "namespace": b"gpus\n"}.items():
        write(folder / name, content)
    return folder


POD = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "KUBERNETES_SERVICE_PORT": "6443"}


@pytest.mark.parametrize(
    ("given", "context", "env", "server"),
    [
        pytest.param("flag", None, {"KUBECONFIG": "one", **POD}, "http://flag", id="first-the-flag"),
        pytest.param(None, None, {"KUBECONFIG": "one", **POD}, "http://one", id="then-the-variable-even-in-a-pod"),
        pytest.param(None, None, POD, "https://10.0.0.1:6443", id="then-the-pod"),
        pytest.param(None, None, {}, "http://home", id="then-the-home-folder"),
        pytest.param(None, "home", POD, "http://home", id="a-context-selects-a-kubeconfig-even-in-a-pod"),
        pytest.param(None, None, {"KUBECONFIG": "one:two"}, "http://one", id="the-first-of-several-files-is-current"),
        pytest.param(None, "two", {"KUBECONFIG": "one:two"}, "http://two", id="contexts-of-all-files-can-be-selected"),
        pytest.param(None, None, {"KUBECONFIG": "absent::two"}, "http://two", id="missing-files-are-skipped"),
        pytest.param(None, "one", {"KUBECONFIG": "one:again"}, "http://one", id="the-first-entry-of-a-name-wins"),
        pytest.param(
            None, None, {**POD, "KUBERNETES_SERVICE_HOST": "fd00::1"}, "https://[fd00::1]:6443", id="a-pod-with-IPv6"
        ),
    ],
)
def test_which_cluster(
    given: str | None, context: str | None, env: dict[str, str], server: str, tmp_path: Path, pod_folder: Path
) -> None:
    for name in ("flag", "one", "two"):
        write(tmp_path / name, config(name=name))
    write(tmp_path / "again", config(name="one", cluster={"server": "http://again"}))
    write(tmp_path / ".kube" / "config", config(name="home"))
    listed = ":".join(part and str(tmp_path / part) for part in env.get("KUBECONFIG", "").split(":"))
    access = load(
        given and str(tmp_path / given),
        context,
        {**env, "KUBECONFIG": listed, "HOME": str(tmp_path)},
        folder=pod_folder,
    )
    assert access.server == server


def test_the_service_account_of_the_pod(pod_folder: Path) -> None:
    access = load(None, None, POD, folder=pod_folder)
    assert (access.namespace, headers(access)) == ("gpus", {"Authorization": "Bearer pod-token"})
    assert access.ssl is not None
    assert access.ssl.verify_mode == ssl.CERT_REQUIRED
    assert len(access.ssl.get_ca_certs()) == 1  # only this CA


def test_a_rotated_token_is_read_after_a_minute_or_at_once_after_a_401(pod_folder: Path) -> None:
    now = [0.0]
    access = load(None, None, POD, folder=pod_folder, clock=lambda: now[0])
    token = pod_folder / "token"
    tokens: list[str] = []
    steps = [(0, "t0", False), (59, "t1", False), (60, "t1", False), (61, "t2", True), (62, "", True), (63, "t3", True)]
    for moment, content, rejected in steps:
        now[0] = moment
        token.write_text(content)
        if rejected:
            access.rejected({"Authorization": tokens[-1]})
        tokens.append(headers(access)["Authorization"])
    assert tokens == ["Bearer t0", "Bearer t0", "Bearer t1", "Bearer t2", "Bearer t2", "Bearer t3"]


def test_a_401_for_an_older_token_keeps_the_newer_one(pod_folder: Path) -> None:
    access = load(None, None, POD, folder=pod_folder)
    old = headers(access)
    (pod_folder / "token").write_text("newer")
    access.rejected(old)
    assert headers(access) == {"Authorization": "Bearer newer"}
    (pod_folder / "token").write_text("newest")
    access.rejected(old)
    assert headers(access) == {"Authorization": "Bearer newer"}


# ---- a user of a kubeconfig -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("user", "want"),
    [
        pytest.param({}, None, id="no-credentials"),
        pytest.param({"token": SECRET}, f"Bearer {SECRET}", id="a-token"),
        pytest.param({"tokenFile": "deep/token"}, "Bearer filed", id="a-token-file-beside-the-kubeconfig"),
        pytest.param(
            {"token": SECRET, "tokenFile": "deep/token"}, "Bearer filed", id="a-token-file-has-priority-over-a-token"
        ),
        pytest.param({"username": "u", "password": "p"}, f"Basic {encoded(b'u:p')}", id="name-and-password"),
    ],
)
def test_the_authorization_of_a_user(user: dict[str, Any], want: str | None, tmp_path: Path) -> None:
    write(tmp_path / "deep" / "token", b"filed\n")
    access = load(write(tmp_path / "config", config(user)), None, {})
    assert headers(access).get("Authorization") == want


def test_the_other_fields_of_a_context(tmp_path: Path) -> None:
    cluster = {"server": "http://h/k8s/", "tls-server-name": "api", "proxy-url": "http://proxy:3128"}
    context = {"name": "main", "context": {"cluster": "main", "namespace": "team"}}
    access = load(write(tmp_path / "c", config(cluster=cluster, contexts=[context])), None, {})
    assert (access.server, access.server_name, access.proxy) == ("http://h/k8s", "api", "http://proxy:3128")
    assert (access.namespace, headers(access)) == ("team", {})


CLUSTERS = [
    pytest.param({"certificate-authority-data": encoded(AUTHORITY.pem)}, ssl.CERT_REQUIRED, 1, id="a-CA-as-data"),
    pytest.param({"certificate-authority": "deep/ca.crt"}, ssl.CERT_REQUIRED, 1, id="a-CA-file-beside-the-kubeconfig"),
    pytest.param({"insecure-skip-tls-verify": True}, ssl.CERT_NONE, None, id="insecure"),
    pytest.param({}, ssl.CERT_REQUIRED, None, id="the-CAs-of-this-machine"),
]


@pytest.mark.parametrize(("cluster", "mode", "count"), CLUSTERS)
def test_the_ca_of_a_cluster(cluster: dict[str, Any], mode: ssl.VerifyMode, count: int | None, tmp_path: Path) -> None:
    write(tmp_path / "deep" / "ca.crt", AUTHORITY.pem)
    access = load(write(tmp_path / "c", config(cluster={"server": "https://h", **cluster})), None, {})
    assert access.ssl is not None
    assert access.ssl.verify_mode == mode
    assert count is None or len(access.ssl.get_ca_certs()) == count


@pytest.mark.parametrize(
    "user",
    [
        pytest.param({"client-certificate": "me.crt", "client-key": "me.key"}, id="files"),
        pytest.param(
            {"client-certificate-data": encoded(ME.certificate), "client-key-data": encoded(ME.key)}, id="data"
        ),
        pytest.param({"client-certificate": "me.crt", "client-key-data": encoded(ME.key)}, id="one-of-each"),
    ],
)
def test_a_client_certificate_leaves_no_file_behind(
    user: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    write(tmp_path / "me.crt", ME.certificate)
    write(tmp_path / "me.key", ME.key)
    modes: list[int] = []
    unlink = os.unlink

    def watched_unlink(name: str) -> None:
        modes.append(os.stat(name).st_mode & 0o777)
        unlink(name)

    monkeypatch.setattr(os, "unlink", watched_unlink)
    load(write(tmp_path / "c", config(user, {"server": "https://h"})), None, {})
    assert (modes, list(temporary.iterdir())) == ([0o600], [])


# ---- error messages -------------------------------------------------------------------------------------------------

ENCRYPTED = load_pem_private_key(ME.key, None).private_bytes(
    Encoding.PEM, PrivateFormat.TraditionalOpenSSL, BestAvailableEncryption(b"phrase")
)
PLUGIN = {"command": "x", "apiVersion": "client.authentication.k8s.io/v1"}


@pytest.mark.parametrize(
    ("content", "context", "words"),
    [
        pytest.param(
            config(name="prod-eu"), "prod-ue", ["'prod-ue'", "did you mean prod-eu?"], id="a-misspelt-context"
        ),
        pytest.param(config(), "zzz", ["'zzz'", "there are: main"], id="no-such-context"),
        pytest.param({**config(), "current-context": ""}, None, ["--context", "main"], id="no-current-context"),
        pytest.param({}, None, ["no current-context", "(there are none)"], id="an-empty-file"),
        pytest.param(b"", None, ["no current-context"], id="a-file-of-0-bytes"),
        pytest.param({**config(), "clusters": None}, None, ["no cluster is named 'main'"], id="no-such-cluster"),
        pytest.param({**config(), "users": None}, None, ["no user is named 'main'"], id="no-such-user"),
        pytest.param(
            config(cluster={"server": "host:6443"}), None, ["'host:6443'", "https://"], id="a-server-that-is-not-a-URL"
        ),
        pytest.param(b"a: b: " + SECRET.encode(), None, ["invalid YAML (line 1)"], id="invalid-YAML"),
        pytest.param(b"- " + SECRET.encode(), None, ["not a kubeconfig"], id="a-list"),
        pytest.param(
            config({"token": [SECRET]}),
            None,
            ["`users[0].user.token`: expected text, got a list"],
            id="a-token-that-is-a-list",
        ),
        pytest.param(config({"tokenFile": 7, "token": SECRET}), None, ["tokenFile"], id="a-path-that-is-a-number"),
        pytest.param(
            config(cluster={"server": "https://h", "certificate-authority-data": encoded(SECRET.encode())}),
            None,
            ["certificate-authority", "PEM"],
            id="a-CA-that-is-not-PEM",
        ),
        pytest.param(
            config(cluster={"certificate-authority-data": f"!{SECRET}"}),
            None,
            ["not base64"],
            id="data-that-is-not-base64",
        ),
        pytest.param(
            config(cluster={"certificate-authority": "absent.crt"}),
            None,
            ["absent.crt", "correct the path"],
            id="a-missing-file",
        ),
        pytest.param(
            config(cluster={"insecure-skip-tls-verify": True, "certificate-authority-data": encoded(AUTHORITY.pem)}),
            None,
            ["remove one of them"],
            id="a-CA-and-insecure",
        ),
        pytest.param(
            config({"client-key-data": encoded(ME.key)}), None, ["set both"], id="a-key-without-its-certificate"
        ),
        pytest.param(
            config(
                {"client-certificate-data": encoded(ME.certificate), "client-key-data": encoded(ENCRYPTED)},
                {"server": "https://h"},
            ),
            None,
            ["passphrase"],
            id="a-key-with-a-passphrase",
        ),
        pytest.param(
            config({"auth-provider": {"name": "gcp"}}), None, ["auth-provider", "exec"], id="an-auth-provider"
        ),
        pytest.param(config({"token": SECRET, "as": "root"}), None, ["impersonation"], id="impersonation"),
        pytest.param(
            config({"exec": {**PLUGIN, "apiVersion": "client.authentication.k8s.io/v1alpha1"}}),
            None,
            ["v1alpha1", "v1beta1"],
            id="an-unsupported-plugin-version",
        ),
        pytest.param(
            config({"exec": {**PLUGIN, "interactiveMode": "Always"}}),
            None,
            ["interactive"],
            id="an-interactive-plugin",
        ),
    ],
)
def test_a_bad_kubeconfig_says_what_to_do(
    content: object, context: str | None, words: list[str], tmp_path: Path
) -> None:
    file = write(tmp_path / "config", content)
    with pytest.raises(InputError) as caught:
        load(file, context, {})
    message = str(caught.value)
    assert [word for word in [file, *words] if word not in message] == []
    assert SECRET not in message


def test_no_kubeconfig_at_all(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no cluster is configured: .*/\.kube/config.*--kubeconfig"):
        load(None, None, {"HOME": str(tmp_path)})
    with pytest.raises(InputError, match="absent"):
        load(str(tmp_path / "absent"), None, POD)


def test_a_pod_without_a_service_account(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="automountServiceAccountToken"):
        load(None, None, POD, folder=tmp_path)


def test_a_missing_token_file(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no token can be read"):
        asyncio.run(TokenFile(tmp_path / "token").credential())


# ---- plugins --------------------------------------------------------------------------------------------------------

V1, BETA = credentials.PLUGIN_VERSIONS


def credential(version: str = V1, **status: str) -> str:
    return orjson.dumps({"kind": "ExecCredential", "apiVersion": version, "status": status}).decode()


def script(tmp_path: Path, body: str) -> Path:
    """A plugin that counts its runs in the file `runs`."""
    path = tmp_path / "bin" / "plugin"
    write(path, f"#!/bin/sh\necho run >> '{tmp_path}/runs'\n{body}\n".encode())
    path.chmod(0o700)
    return path


def runs(tmp_path: Path) -> int:
    return len((tmp_path / "runs").read_text().split())


def plugin_config(command: str = "bin/plugin", version: str = V1, **more: Any) -> dict[str, Any]:
    return config({"exec": {"command": command, "apiVersion": version, "args": None, "env": None, **more}})


@pytest.mark.parametrize("version", [V1, BETA])
def test_a_plugin_prints_a_token(version: str, tmp_path: Path) -> None:
    script(tmp_path, f"cat <<'X'\n{credential(version, token='t1')}\nX")
    access = load(write(tmp_path / "config", plugin_config(version=version)), None, {})
    assert headers(access) == {"Authorization": "Bearer t1"}


@contextmanager
def input_available() -> Iterator[None]:
    """This process's standard input has a line to read."""
    before = os.dup(0)
    reader, writer = os.pipe()
    os.write(writer, b"yes\n")
    os.dup2(reader, 0)
    try:
        yield
    finally:
        os.dup2(before, 0)
        for descriptor in (before, reader, writer):
            os.close(descriptor)


def test_a_plugin_gets_arguments_and_environment_and_no_standard_input(tmp_path: Path) -> None:
    body = (
        'read line && exit 9\nprintf \'{"apiVersion":"%s","status":{"token":"%s-%s-%s"}}\' "$3" "$1" "$FLAVOUR" "$BASE"'
    )
    script(tmp_path, f"{body}\nprintf %s \"$KUBERNETES_EXEC_INFO\" > '{tmp_path}/info'")
    wants = plugin_config(args=["a", "b", V1], env=[{"name": "FLAVOUR", "value": "mint"}])
    access = load(write(tmp_path / "config", wants), None, {"BASE": "base", "PATH": os.environ["PATH"]})
    with input_available():
        assert headers(access) == {"Authorization": "Bearer a-mint-base"}
    info = {"kind": "ExecCredential", "apiVersion": V1, "spec": {"interactive": False}}
    assert orjson.loads((tmp_path / "info").read_bytes()) == info


def test_a_bare_command_is_found_by_path(tmp_path: Path) -> None:
    script(tmp_path, f"echo '{credential(token='t1')}'")
    access = load(write(tmp_path / "config", plugin_config("plugin")), None, {"PATH": f"{tmp_path}/bin:/bin"})
    assert headers(access) == {"Authorization": "Bearer t1"}


@pytest.mark.parametrize(
    ("status", "moments", "want"),
    [
        pytest.param({}, [0, 1e9], 1, id="without-an-expiration-it-is-kept"),
        pytest.param(
            {"expirationTimestamp": "1970-01-01T01:00:00Z"}, [0, 3569], 1, id="kept-until-shortly-before-its-expiration"
        ),
        pytest.param({"expirationTimestamp": "1970-01-01T01:00:00Z"}, [0, 3570], 2, id="then-run-again"),
    ],
)
def test_a_credential_of_a_plugin_is_cached(
    status: dict[str, str], moments: list[float], want: int, tmp_path: Path
) -> None:
    now = [0.0]
    script(tmp_path, f"echo '{credential(token='t', **status)}'")
    access = load(write(tmp_path / "config", plugin_config()), None, {}, wall=lambda: now[0])
    for moment in moments:
        now[0] = moment
        headers(access)
    assert runs(tmp_path) == want


def test_a_plugin_runs_again_after_a_401_and_once_for_many_requests(tmp_path: Path) -> None:
    script(tmp_path, f"wc -l < '{tmp_path}/runs' | xargs printf '{credential(token='t%s')}'")

    async def run() -> list[dict[str, str]]:
        access = load(write(tmp_path / "config", plugin_config()), None, {"PATH": os.environ["PATH"]})
        first = await asyncio.gather(*(access.headers() for _ in range(5)))
        for old in first:
            access.rejected(old)
        return [*first, *await asyncio.gather(*(access.headers() for _ in range(5)))]

    assert [sent["Authorization"] for sent in asyncio.run(run())] == ["Bearer t1"] * 5 + ["Bearer t2"] * 5
    assert runs(tmp_path) == 2


def test_a_plugin_prints_a_certificate(tmp_path: Path) -> None:
    def output(issued: Issued) -> str:
        pair = {"clientCertificateData": issued.certificate.decode(), "clientKeyData": issued.key.decode()}
        return credential(**pair)

    script(tmp_path, f"cat '{tmp_path}/answer'")
    wants = plugin_config()
    wants["clusters"][0]["cluster"]["server"] = "https://h"
    access = load(write(tmp_path / "config", wants), None, {"PATH": os.environ["PATH"]})
    contexts = [access.ssl]
    for issued in (ME, ME, AUTHORITY.issue("me again")):
        write(tmp_path / "answer", output(issued).encode())
        access.rejected({})
        assert headers(access) == {}
        contexts.append(access.ssl)
    none, first, same, second = contexts
    assert none is not first
    assert first is same  # open connections stay in use
    assert first is not second


@pytest.mark.parametrize(
    ("body", "words"),
    [
        pytest.param("exit 3", "exited with code 3", id="it-fails"),
        pytest.param(f"echo {SECRET}", "printed no ExecCredential", id="it-prints-another-text"),
        pytest.param(f"echo '{credential(BETA, token=SECRET)}'", "another apiVersion", id="it-prints-another-version"),
        pytest.param(f"echo '{credential()}'", "neither a token nor a certificate", id="it-prints-no-credential"),
        pytest.param(
            f"echo '{credential(clientCertificateData=SECRET)}'",
            "neither a token",
            id="it-prints-a-certificate-without-its-key",
        ),
        pytest.param("exec sleep 30", "timed out after", id="it-hangs"),
        pytest.param("sleep 30", "timed out after", id="its-child-hangs"),
        pytest.param(
            f"echo '{credential(token=SECRET)}'; sleep 30 &",
            "timed out after",
            id="its-child-keeps-the-pipe-open",
        ),
        pytest.param("exec yes", "printed more than 1048576 bytes", id="it-prints-endlessly"),
        pytest.param("yes; echo", "printed more than", id="its-child-prints-endlessly"),
        pytest.param(
            "printf '{\"x\":'; head -c 100000 /dev/zero | tr '\\0' '['",
            "printed no ExecCredential",
            id="it-prints-brackets",
        ),
    ],
)
def test_a_plugin_that_fails_says_what_to_do(
    body: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(credentials, "PLUGIN_TIMEOUT", 0.05 if "sleep" in body else 10.0)
    script(tmp_path, body)
    access = load(write(tmp_path / "config", plugin_config()), None, {"PATH": os.environ["PATH"]})
    with pytest.raises(InputError, match=r"by hand|set the plugin's own") as caught:
        headers(access)
    assert words in str(caught.value)
    assert SECRET not in str(caught.value)


def test_a_plugin_that_is_not_there_says_so() -> None:
    plugin = ExecPlugin(ExecConfig("absent-plugin", V1), "config, context 'main'", {"PATH": ""})
    with pytest.raises(InputError, match=r"context 'main': exec plugin 'absent-plugin' cannot be started.*install it"):
        asyncio.run(plugin.credential())


def test_plain_http_needs_no_context() -> None:
    assert ServerTrust().context(ME.pem) is None
