"""Which node agents are alive: one Lease per node, and how long we have seen it unchanged.

Room:  the Leases of the agents' namespace, as our watch shows them. No I/O; it knows neither fleet nor book.
Door:  `listed`, `changed`, `look` return the nodes to judge anew; `is_stale(node)` is the judgement.

No clock of another machine is believed: an agent is silent when *we* have seen its Lease unchanged for longer than the
Lease says, or when it let go of the Lease (no holder), as one does that stops on purpose. It speaks again with the next
renewal. A node without a Lease has no agent of ours, and is never silent.

What we cannot see is held against nobody. While our own watch is broken, and when this process itself was asleep,
nobody falls silent, and all begin anew. And when several agents stop at one moment, it is likelier that we are deaf:
then the API server must have said something since (a bookmark comes once a minute) before they are believed to be gone.

A renewal, which is nearly all that is ever heard here, costs one look into a dict.
"""

import math
from collections.abc import Callable, Iterable

import msgspec

from gputile.kube.api import AgentLease, LeaseRenewal

USUAL = 40  # seconds a Lease holds that does not say how long
ASLEEP = 5.0  # seconds between two looks after which it is we who were away
CROWD = 3  # agents that do not all fall silent at one moment


class AgentLivenessSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the scheduler and the agents on the nodes hear of each other."""

    namespace: str = "gputile-agents"
    """Where each agent keeps the Lease of its node. Empty: agents are not followed, and nobody is silent."""

    orphan_grace: float = 30.0
    """Seconds that an agent has to tell of containers that run on although their pod was deleted by force. The pod's
    tile is not sold again before; and not before the agent has then shown that it is alive. Only where there is one."""


class AgentStatus(msgspec.Struct):
    """One Lease, and what we make of it."""

    beat: LeaseRenewal
    renewed: float  # when we last saw it change
    since: float  # from when on its silence counts: later than that, if we could not see
    use: str = ""  # what the node's containers use, as the agent wrote it

    @property
    def lasts(self) -> float:
        said = self.beat.lease_duration_seconds
        return float(said) if said is not None and said > 0 else USUAL

    @property
    def until(self) -> float:
        return self.since + self.lasts


class AgentLiveness:
    """See the module's text."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._sights: dict[str, AgentStatus] = {}  # by node
        self._silent: set[str] = set()
        self._due = math.inf  # nobody can fall silent sooner
        self._heard = self._looked = clock()
        self._deaf = False  # our watch is broken
        self._dozed = False  # this process was away before the last look

    def __contains__(self, node: str) -> bool:
        """Whether an agent of ours has, or had, the node."""
        return node in self._sights

    def is_stale(self, node: str) -> bool:
        return node in self._silent

    def renewed(self, node: str) -> float:
        """When we last saw the agent renew its Lease; one that is silent never did."""
        return -math.inf if node in self._silent or node not in self._sights else self._sights[node].renewed

    def use(self, node: str) -> str:
        """What the agent last wrote of its containers' use; "" when it wrote nothing, or nothing lately."""
        sight = self._sights.get(node)
        if sight is None or node in self._silent or self._clock() - sight.renewed > sight.lasts:
            return ""
        return sight.use

    def renew_time(self, node: str) -> str | None:
        """What the agent itself wrote as the time of its last renewal; for people."""
        sight = self._sights.get(node)
        return sight.beat.renew_time if sight is not None else None

    @property
    def is_disconnected(self) -> bool:
        """Whether agents may have said something that we have not heard."""
        return self._deaf or self._dozed

    def counts(self) -> dict[str, int]:
        return {"alive": len(self._sights) - len(self._silent), "stale": len(self._silent)}

    # ---- what the watch says ----------------------------------------------------------------------------------------

    def listed(self, leases: Iterable[AgentLease]) -> list[str]:
        """One list shows all Leases: what it does not show is gone."""
        self.heard()
        found = {lease.name: lease for lease in leases}
        gone = [name for name in self._sights if name not in found]
        return [*self._gone(gone), *(name for lease in found.values() for name in self._seen(lease))]

    def changed(self, lease: AgentLease, *, deleted: bool = False) -> list[str]:
        """The nodes to judge anew: none, as a rule."""
        self.heard()
        return self._gone([lease.name]) if deleted else self._seen(lease)

    def heard(self) -> None:
        """The API server said something, be it that nothing has changed."""
        self._heard = self._clock()
        if self._deaf:
            self._deaf = False
            self._begin_anew()

    def deaf(self) -> None:
        """The watch broke; `heard` ends that."""
        self._deaf = True

    def _gone(self, names: list[str]) -> list[str]:
        self._silent.difference_update(names)
        return [name for name in names if self._sights.pop(name, None) is not None]

    def _seen(self, lease: AgentLease) -> list[str]:
        name, beat, sight = lease.name, lease.beat, self._sights.get(lease.name)
        if sight is not None and beat == sight.beat:
            return []  # listed again, or touched by somebody else
        now = self._clock()
        # One that we have not seen renewed may be old, and what it says of use, too.
        seen = self._sights[name] = AgentStatus(beat, now, now, lease.use if sight is not None else "")
        self._due = min(self._due, seen.until)
        was, left = name in self._silent, not beat.holder_identity
        (self._silent.add if left else self._silent.discard)(name)
        return [name] if sight is None or was is not left else []

    # ---- what time says ---------------------------------------------------------------------------------------------

    def look(self) -> list[str]:
        """The nodes whose agents have fallen silent since the last look. Called several times a second."""
        now = self._clock()
        self._dozed, self._looked = now - self._looked > ASLEEP, now
        if self._dozed:
            self._begin_anew()
        if self._deaf or now < self._due:
            return []
        alive = {name: sight for name, sight in self._sights.items() if name not in self._silent}
        late = [name for name, sight in alive.items() if sight.until <= now]
        fallen = [name for name in late if self._is_believed(alive[name], len(alive))]
        self._silent.update(fallen)
        self._due = min((sight.until for name, sight in alive.items() if name not in self._silent), default=math.inf)
        return fallen

    def _is_believed(self, sight: AgentStatus, alive: int) -> bool:
        """In a crowd there is always somebody to be heard; else we are deaf."""
        return alive < CROWD or self._heard > sight.until - sight.lasts / 2

    def _begin_anew(self) -> None:
        now = self._clock()
        for sight in self._sights.values():
            sight.since = now
