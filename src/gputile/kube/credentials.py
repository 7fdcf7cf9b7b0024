"""Credentials that change: a token file that is read anew, an exec plugin that is run anew.

Room:  the sources of credentials; no secret is ever part of an error.
Door:  `CredentialSource.credential` before each request, `CredentialSource.forget` after the server refused it.
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

TOKEN_AGE = 60.0  # seconds to go on with a token file once read
EXPIRY_MARGIN = 30.0  # seconds before its end that a plugin's credential is no longer used
PLUGIN_PATIENCE = 60.0  # seconds a plugin may take; some ask a cloud
PLUGIN_PRINTS = 2**20  # bytes a plugin may print; a token has a few thousand, a certificate with its key too
LAST_WORDS = 1.0  # seconds for the pipe of a plugin that was killed to run dry
PLUGIN_VERSIONS = ("client.authentication.k8s.io/v1", "client.authentication.k8s.io/v1beta1")

Clock: TypeAlias = Callable[[], float]


class ExecVariable(msgspec.Struct, frozen=True):
    name: str
    value: str


class ExecConfig(msgspec.Struct, frozen=True, rename="camel"):
    command: str
    api_version: str
    args: tuple[str, ...] | None = None
    env: tuple[ExecVariable, ...] | None = None
    interactive_mode: str | None = None


class Credential(msgspec.Struct, frozen=True):
    authorization: str | None = None  # the whole header
    certificate: bytes | None = None  # certificate and key, PEM


class CredentialSource(Protocol):
    """Credentials, good for now. `forget` after the server refused them."""

    async def credential(self) -> Credential: ...

    def forget(self) -> None: ...


class StaticCredential:
    """A token or password that stays as it is, or nothing at all."""

    def __init__(self, authorization: str | None = None) -> None:
        self._credential = Credential(authorization)

    async def credential(self) -> Credential:
        return self._credential

    def forget(self) -> None:
        """There is nothing else to offer."""


class TokenFile:
    """A token that somebody else, mostly the kubelet, keeps fresh in a file."""

    def __init__(self, path: Path, clock: Clock = time.monotonic) -> None:
        self._path, self._clock = path, clock
        self._held: Credential | None = None
        self._due = clock()

    async def credential(self) -> Credential:
        if self._held is None or self._clock() >= self._due:
            self._held = self._read() or self._held
            self._due = self._clock() + TOKEN_AGE
        if self._held is None:
            raise InputError(f"{self._path}: no token can be read from this file; mount one, or mend the path")
        return self._held

    def forget(self) -> None:
        self._due = self._clock()

    def _read(self) -> Credential | None:
        """None while the file is away or empty: the token before may still be good."""
        try:
            token = self._path.read_text().strip()
        except (OSError, UnicodeDecodeError):
            return None
        return Credential(f"Bearer {token}") if token else None


class ExecCredentialStatus(msgspec.Struct, frozen=True, rename="camel"):
    token: str | None = None
    client_certificate_data: str | None = None
    client_key_data: str | None = None
    expiration_timestamp: datetime | None = None


class ExecCredential(msgspec.Struct, frozen=True, rename="camel"):
    api_version: str
    status: ExecCredentialStatus


class ExecPlugin:
    """A command that prints credentials, as `aws` and `gcloud` have them. It is never asked to talk to a person."""

    def __init__(self, spec: ExecConfig, where: str, env: Mapping[str, str], wall: Clock = time.time) -> None:
        self._spec, self._where, self._wall = spec, where, wall
        self._env = {**env, **{one.name: one.value for one in spec.env or ()}, "KUBERNETES_EXEC_INFO": self._info()}
        self._held: tuple[Credential, float] | None = None  # and when it ends
        self._turn = asyncio.Lock()

    async def credential(self) -> Credential:
        async with self._turn:  # many requests wait for one run
            if self._held is None or self._wall() >= self._held[1] - EXPIRY_MARGIN:
                self._held = self._understood(await self._printed())
            return self._held[0]

    def forget(self) -> None:
        self._held = None

    def _info(self) -> str:
        told = {"kind": "ExecCredential", "apiVersion": self._spec.api_version, "spec": {"interactive": False}}
        return json.dumps(told)

    async def _printed(self) -> bytes:
        quiet, pipe = asyncio.subprocess.DEVNULL, asyncio.subprocess.PIPE
        command = (self._spec.command, *(self._spec.args or ()))
        try:
            process = await asyncio.create_subprocess_exec(
                *command, stdin=quiet, stdout=pipe, env=self._env, start_new_session=True
            )
        except OSError as wrong:
            raise self._trouble(f"cannot be started: {wrong.strerror}; install it, or mend the path") from wrong
        printed = await self._patiently(process)
        if process.returncode:
            raise self._trouble(f"ended with {process.returncode}; run it by hand to see why")
        return printed

    async def _patiently(self, process: asyncio.subprocess.Process) -> bytes:
        assert process.stdout is not None
        is_done = False
        try:
            async with asyncio.timeout(PLUGIN_PATIENCE):
                printed = await self._bounded(process.stdout)
                await process.wait()
            is_done = True
        except TimeoutError:
            raise self._trouble(f"did not end within {PLUGIN_PATIENCE:.0f} s; run it by hand to see why") from None
        finally:
            if not is_done:
                await _end(process, process.stdout)
        return printed

    async def _bounded(self, stdout: asyncio.StreamReader) -> bytes:
        printed = bytearray()
        while chunk := await stdout.read(2**16):
            printed += chunk
            if len(printed) > PLUGIN_PRINTS:
                raise self._trouble(f"prints more than {PLUGIN_PRINTS} bytes; run it by hand to see what it says")
        return bytes(printed)

    def _understood(self, printed: bytes) -> tuple[Credential, float]:
        try:
            answer = msgspec.json.decode(printed, type=ExecCredential)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            raise self._trouble("printed no ExecCredential with a status; run it by hand to see what it says") from None
        if answer.api_version != self._spec.api_version:
            raise self._trouble(f"answers in another apiVersion than {self._spec.api_version}; name its own there")
        said = answer.status
        if not said.token and not (said.client_certificate_data and said.client_key_data):
            raise self._trouble("gave neither a token nor a certificate with its key; run it by hand to see why")
        pair = f"{said.client_certificate_data}\n{said.client_key_data}\n".encode()
        held = Credential(
            f"Bearer {said.token}" if said.token else None, pair if said.client_certificate_data else None
        )
        return held, _seconds(said.expiration_timestamp)

    def _trouble(self, what: str) -> InputError:
        return InputError(f"{self._where}: exec plugin {self._spec.command!r} {what}")


async def _end(process: asyncio.subprocess.Process, stdout: asyncio.StreamReader) -> None:
    """Kill a plugin with all that it started: a child of its would keep the pipe open, and us waiting for it."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    with suppress(TimeoutError):
        async with asyncio.timeout(LAST_WORDS):
            while await stdout.read(2**16):
                pass
            await process.wait()


def _seconds(ends: datetime | None) -> float:
    if ends is None:
        return float("inf")
    return (ends if ends.tzinfo else ends.replace(tzinfo=UTC)).timestamp()
