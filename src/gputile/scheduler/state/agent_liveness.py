"""Which node agents are alive, judged by how long our watch has seen the Lease of each node unchanged. No I/O.

It knows the Leases of the agents' namespace, and neither fleet nor ledger. `listed`, `changed` and `check` return the
nodes whose state must be evaluated again; `is_stale(node)` is the result.

Clocks of other machines are not trusted. An agent is stale when *we* have seen its Lease unchanged for longer than the
Lease duration, or when it released the Lease (no holder), as an agent does on a graceful stop. It is alive again with
the next renewal. A node without a Lease has no agent of ours, and is never stale.

Agents are not blamed for what we cannot see. While our own watch is broken, or after this process was suspended, no
agent becomes stale, and all durations start again. When several agents stop at one moment, a disconnected watch is the
likelier cause: then they become stale only if the API server has sent something since (a bookmark comes once a minute).

Nearly all updates are renewals, and a renewal costs one dict lookup.
"""

import math
from collections.abc import Callable, Iterable

import msgspec

from gputile.kube.api import AgentLease, LeaseRenewal

DEFAULT_DURATION = 40  # seconds, for a Lease without `leaseDurationSeconds`
SUSPENDED = 5.0  # seconds between two checks after which this process itself must have been suspended
CROWD = 3  # from so many agents on, it is unlikely that all of them stop at one moment


class AgentLivenessSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the scheduler watches the agents on the nodes."""

    namespace: str = "gputile-agents"
    """Namespace in which each agent keeps the Lease of its node. Empty: agents are not watched, and none is stale."""

    orphan_grace: float = 30.0
    """Seconds that an agent has to report containers that outlive a force-deleted pod. The GPU share of the pod is
    allocated again only after this time and after the agent has then renewed its Lease. No effect on nodes without an
    agent."""


class AgentStatus(msgspec.Struct):
    """The last renewal of an agent's Lease, and when our watch showed it."""

    beat: LeaseRenewal
    renewed: float  # when we last saw the Lease change
    since: float  # start of the Lease duration: later than `renewed` if the watch was broken
    use: str = ""  # the usage of the node's containers, as the agent wrote it

    @property
    def duration(self) -> float:
        seconds = self.beat.lease_duration_seconds
        return float(seconds) if seconds is not None and seconds > 0 else DEFAULT_DURATION

    @property
    def until(self) -> float:
        return self.since + self.duration


class AgentLiveness:
    """The node agents that our watch of Leases shows, and which of them are stale."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._statuses: dict[str, AgentStatus] = {}  # by node
        self._stale: set[str] = set()
        self._due = math.inf  # no agent can become stale sooner
        self._watch_seen = self._checked = clock()
        self._watch_broken = False
        self._was_suspended = False  # this process, before the last check

    def __contains__(self, node: str) -> bool:
        """Whether the node has, or had, an agent of ours."""
        return node in self._statuses

    def is_stale(self, node: str) -> bool:
        return node in self._stale

    def renewed(self, node: str) -> float:
        """When we last saw the agent renew its Lease; minus infinity for a stale agent."""
        return -math.inf if node in self._stale or node not in self._statuses else self._statuses[node].renewed

    def use(self, node: str) -> str:
        """The usage that the agent last wrote; "" when there is none, or when it is older than the Lease duration."""
        status = self._statuses.get(node)
        if status is None or node in self._stale or self._clock() - status.renewed > status.duration:
            return ""
        return status.use

    def renew_time(self, node: str) -> str | None:
        """The `renewTime` that the agent itself wrote; for display only."""
        status = self._statuses.get(node)
        return status.beat.renew_time if status is not None else None

    @property
    def is_disconnected(self) -> bool:
        """Whether our watch may have missed updates of agents."""
        return self._watch_broken or self._was_suspended

    def counts(self) -> dict[str, int]:
        return {"alive": len(self._statuses) - len(self._stale), "stale": len(self._stale)}

    # ---- updates of the watch ---------------------------------------------------------------------------------------

    def listed(self, leases: Iterable[AgentLease]) -> list[str]:
        """A list shows all Leases: a missing Lease was deleted."""
        self.watch_alive()
        by_name = {lease.name: lease for lease in leases}
        gone = [name for name in self._statuses if name not in by_name]
        return [*self._remove(gone), *(name for lease in by_name.values() for name in self._update(lease))]

    def changed(self, lease: AgentLease, *, deleted: bool = False) -> list[str]:
        """The nodes whose state must be evaluated again: usually none."""
        self.watch_alive()
        return self._remove([lease.name]) if deleted else self._update(lease)

    def watch_alive(self) -> None:
        """The API server sent something, even if it is only a bookmark."""
        self._watch_seen = self._clock()
        if self._watch_broken:
            self._watch_broken = False
            self._restart_durations()

    def watch_failed(self) -> None:
        """The watch broke; `watch_alive` ends that."""
        self._watch_broken = True

    def _remove(self, names: list[str]) -> list[str]:
        self._stale.difference_update(names)
        return [name for name in names if self._statuses.pop(name, None) is not None]

    def _update(self, lease: AgentLease) -> list[str]:
        name, beat, before = lease.name, lease.beat, self._statuses.get(lease.name)
        if before is not None and beat == before.beat:
            return []  # listed again, or changed by another client
        now = self._clock()
        # A Lease that we have not seen renewed may be old, and so may be the usage on it.
        status = self._statuses[name] = AgentStatus(beat, now, now, lease.use if before is not None else "")
        self._due = min(self._due, status.until)
        was_stale, is_released = name in self._stale, not beat.holder_identity
        (self._stale.add if is_released else self._stale.discard)(name)
        return [name] if before is None or was_stale is not is_released else []

    # ---- time -------------------------------------------------------------------------------------------------------

    def check(self) -> list[str]:
        """The nodes whose agents became stale since the last check. Called several times a second."""
        now = self._clock()
        self._was_suspended, self._checked = now - self._checked > SUSPENDED, now
        if self._was_suspended:
            self._restart_durations()
        if self._watch_broken or now < self._due:
            return []
        alive = {name: status for name, status in self._statuses.items() if name not in self._stale}
        late = [name for name, status in alive.items() if status.until <= now]
        stale = [name for name in late if self._is_credible(alive[name], len(alive))]
        self._stale.update(stale)
        self._due = min((status.until for name, status in alive.items() if name not in self._stale), default=math.inf)
        return stale

    def _is_credible(self, status: AgentStatus, alive: int) -> bool:
        """With several agents the watch must have shown something lately; otherwise it may be disconnected."""
        return alive < CROWD or self._watch_seen > status.until - status.duration / 2

    def _restart_durations(self) -> None:
        now = self._clock()
        for status in self._statuses.values():
            status.since = now
