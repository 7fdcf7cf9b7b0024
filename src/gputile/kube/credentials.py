"""Sources of credentials: static ones, a token file that is reread, an exec plugin that is rerun.

A secret must never be part of an error. Call `CredentialSource.credential` before each request, and
`CredentialSource.forget` after the API server rejected it.
"""

import asyncio
import json
import os
import signal
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Protocol, TypeAlias

import msgspec

from gputile.model.errors import InputError

TOKEN_AGE = 60.0  # seconds between two reads of a token file
EXPIRY_MARGIN = 30.0  # seconds before its expiration that a plugin's credential is no longer used
PLUGIN_TIMEOUT = 60.0  # seconds; some plugins call a cloud API
PLUGIN_OUTPUT = 2**20  # bytes; a token, or a certificate with its key, has a few thousand
DRAIN_TIMEOUT = 1.0  # seconds to drain the pipe of a plugin that was killed
PLUGIN_VERSIONS = ("client.authentication.k8s.io/v1", "client.authentication.k8s.io/v1beta1")

Clock: TypeAlias = Callable[[], float]


class ExecVariable(msgspec.Struct, frozen=True):
    """An environment variable of an exec plugin."""

    name: str
    value: str


class ExecConfig(msgspec.Struct, frozen=True, rename="camel"):
    """The `exec` of a kubeconfig user."""

    command: str
    api_version: str
    args: tuple[str, ...] | None = None
    env: tuple[ExecVariable, ...] | None = None
    interactive_mode: str | None = None


class Credential(msgspec.Struct, frozen=True):
    """An Authorization header, a client certificate, or neither."""

    authorization: str | None = None  # the whole header value
    certificate: bytes | None = None  # certificate and key, PEM


class CredentialSource(Protocol):
    """Returns the current credential. Call `forget` after the server rejected it."""

    async def credential(self) -> Credential: ...

    def forget(self) -> None: ...


class StaticCredential:
    """A token or password that never changes, or no credential."""

    def __init__(self, authorization: str | None = None) -> None:
        self._credential = Credential(authorization)

    async def credential(self) -> Credential:
        return self._credential

    def forget(self) -> None:
        """There is no other credential."""


class TokenFile:
    """A token in a file that another process, mostly the kubelet, rotates."""

    def __init__(self, path: Path, clock: Clock = time.monotonic) -> None:
        self._path, self._clock = path, clock
        self._credential: Credential | None = None
        self._due = clock()

    async def credential(self) -> Credential:
        if self._credential is None or self._clock() >= self._due:
            self._credential = self._read() or self._credential
            self._due = self._clock() + TOKEN_AGE
        if self._credential is None:
            raise InputError(f"{self._path}: no token can be read from this file; mount one, or correct the path")
        return self._credential

    def forget(self) -> None:
        self._due = self._clock()

    def _read(self) -> Credential | None:
        """None while the file is missing or empty: the previous token may still be valid."""
        try:
            token = self._path.read_text().strip()
        except (OSError, UnicodeDecodeError):
            return None
        return Credential(f"Bearer {token}") if token else None


class ExecCredentialStatus(msgspec.Struct, frozen=True, rename="camel"):
    """The `status` of an ExecCredential."""

    token: str | None = None
    client_certificate_data: str | None = None
    client_key_data: str | None = None
    expiration_timestamp: datetime | None = None


class ExecCredential(msgspec.Struct, frozen=True, rename="camel"):
    """The object that an exec plugin prints."""

    api_version: str
    status: ExecCredentialStatus


class ExecPlugin:
    """A command that prints credentials, such as those of `aws` and `gcloud`. It always runs non-interactively."""

    def __init__(self, spec: ExecConfig, where: str, env: Mapping[str, str], wall: Clock = time.time) -> None:
        self._spec, self._where, self._wall = spec, where, wall
        variables = {variable.name: variable.value for variable in spec.env or ()}
        self._env = {**env, **variables, "KUBERNETES_EXEC_INFO": self._info()}
        self._cached: tuple[Credential, float] | None = None  # and its expiration
        self._lock = asyncio.Lock()

    async def credential(self) -> Credential:
        async with self._lock:  # concurrent requests wait for one run
            if self._cached is None or self._wall() >= self._cached[1] - EXPIRY_MARGIN:
                self._cached = self._parse(await self._run())
            return self._cached[0]

    def forget(self) -> None:
        self._cached = None

    def _info(self) -> str:
        info = {"kind": "ExecCredential", "apiVersion": self._spec.api_version, "spec": {"interactive": False}}
        return json.dumps(info)

    async def _run(self) -> bytes:
        quiet, pipe = asyncio.subprocess.DEVNULL, asyncio.subprocess.PIPE
        command = (self._spec.command, *(self._spec.args or ()))
        try:
            process = await asyncio.create_subprocess_exec(
                *command, stdin=quiet, stdout=pipe, env=self._env, start_new_session=True
            )
        except OSError as error:
            raise self._failure(f"cannot be started: {error.strerror}; install it, or correct the path") from error
        output = await self._output(process)
        if process.returncode:
            raise self._failure(f"exited with code {process.returncode}; run it by hand to see why")
        return output

    async def _output(self, process: asyncio.subprocess.Process) -> bytes:
        assert process.stdout is not None
        is_done = False
        try:
            async with asyncio.timeout(PLUGIN_TIMEOUT):
                output = await self._read(process.stdout)
                await process.wait()
            is_done = True
        except TimeoutError:
            raise self._failure(f"timed out after {PLUGIN_TIMEOUT:.0f} s; run it by hand to see why") from None
        finally:
            if not is_done:
                await _kill(process, process.stdout)
        return output

    async def _read(self, stdout: asyncio.StreamReader) -> bytes:
        output = bytearray()
        while chunk := await stdout.read(2**16):
            output += chunk
            if len(output) > PLUGIN_OUTPUT:
                raise self._failure(f"printed more than {PLUGIN_OUTPUT} bytes; run it by hand to see its output")
        return bytes(output)

    def _parse(self, output: bytes) -> tuple[Credential, float]:
        try:
            printed = msgspec.json.decode(output, type=ExecCredential)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            raise self._failure("printed no ExecCredential with a status; run it by hand to see its output") from None
        if printed.api_version != self._spec.api_version:
            raise self._failure(
                f"printed another apiVersion than {self._spec.api_version}; set the plugin's own in the kubeconfig"
            )
        status = printed.status
        if not status.token and not (status.client_certificate_data and status.client_key_data):
            raise self._failure("printed neither a token nor a certificate with its key; run it by hand to see why")
        pair = f"{status.client_certificate_data}\n{status.client_key_data}\n".encode()
        credential = Credential(
            f"Bearer {status.token}" if status.token else None, pair if status.client_certificate_data else None
        )
        return credential, _seconds(status.expiration_timestamp)

    def _failure(self, problem: str) -> InputError:
        return InputError(f"{self._where}: exec plugin {self._spec.command!r} {problem}")


async def _kill(process: asyncio.subprocess.Process, stdout: asyncio.StreamReader) -> None:
    """Kill a plugin with its child processes: a child would keep the pipe open, and this process waiting."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    with suppress(TimeoutError):
        async with asyncio.timeout(DRAIN_TIMEOUT):
            while await stdout.read(2**16):
                pass
            await process.wait()


def _seconds(expiration: datetime | None) -> float:
    if expiration is None:
        return float("inf")
    return (expiration if expiration.tzinfo else expiration.replace(tzinfo=UTC)).timestamp()
