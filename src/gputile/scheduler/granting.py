"""What the book wants done, and pods that came around us: looked up, granted, reported.

Room:  slow work beside the verbs: live looks at pods, grants for pods that another scheduler bound, labels that an API
       server did not take over from a Binding. Only the leader writes.
Door:  `Granter.carry_out(instructions)`, and `Granter.run`, which ends only when cancelled.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable

from gputile.book.events import Conflict, Forgotten, Freed, Gone, Instruction, Verify
from gputile.book.ledger import State
from gputile.dialects import speaking
from gputile.dialects.wire import Award, Pod, Written
from gputile.engine.placing import Placement
from gputile.kube.values import Api, Note, Refused, Unclear
from gputile.model.grants import Grant
from gputile.model.refusals import Refusal
from gputile.model.requests import PodRequest
from gputile.scheduler.mirror import Mirror
from gputile.scheduler.settings import Settings
from gputile.scheduler.verbs import seed_of
from gputile.telemetry.logs import fields
from gputile.telemetry.metrics import Metrics

log = logging.getLogger(__name__)

ROUND = 0.25  # seconds between two looks at what is to be done
AGAIN = 5.0  # seconds until something that failed is tried again


class Granter:
    """See the module's text."""

    def __init__(
        self,
        api: Api,
        mirror: Mirror,
        settings: Settings,
        metrics: Metrics,
        *,
        leads: Callable[[], bool],
        clock: Callable[[], float],
        wall: Callable[[], int],
        pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._api, self._mirror, self._settings, self._metrics = api, mirror, settings, metrics
        self._leads, self._clock, self._wall, self._pause = leads, clock, wall, pause
        self._verify: set[str] = set()
        self._conflicts: list[Conflict] = []
        self._unwritten: dict[str, Grant] = {}  # granted and booked, and not on the pod yet
        self._not_before: dict[str, float] = {}  # by UID: when to try again
        self._reported: dict[str, str] = {}  # by UID: the last thing said about it

    def carry_out(self, instructions: Iterable[Instruction]) -> None:
        """Take note of what the book wants; `run` does it."""
        for instruction in instructions:
            match instruction:
                case Verify(pod):
                    self._metrics.expired.inc()
                    self._verify.add(pod)
                case Conflict():
                    self._metrics.conflicts.inc()
                    self._conflicts.append(instruction)
                case Freed():  # those who were refused may be granted now
                    self._not_before.clear()

    async def run(self) -> None:
        while True:
            try:
                await self.round()
            except (Refused, Unclear) as wrong:
                log.warning("a write to the API server failed", extra=fields(why=str(wrong)))
            await self._pause(ROUND)

    async def round(self) -> None:
        """Everything that is due, once."""
        for uid in sorted(self._verify):
            await self._look_up(uid)
        if not self._leads():
            return
        for uid in list(self._mirror.ungranted):
            if self._is_due(uid):
                self._grant(uid)
        for uid in list(self._unwritten):
            if self._is_due(uid):
                await self._write(uid)
        for uid, pod in self._mirror.take_fresh():
            await self._complete_labels(uid, pod)
        await self._report()

    def _is_due(self, uid: str) -> bool:
        return self._clock() >= self._not_before.get(uid, 0.0)

    # ---- binds whose answer got lost --------------------------------------------------------------------------------

    async def _look_up(self, uid: str) -> None:
        entry = self._mirror.ledger.entry(uid)
        if entry is None or entry.state is not State.ASSUMED:
            self._verify.discard(uid)
            return
        namespace, _, name = entry.holding.name.partition("/")
        live = await self._api.pod(namespace, name)
        if live is None or live.uid != uid:
            self._mirror.ledger.handle(Gone(uid))
        elif live.node_name:
            self.carry_out(self._mirror.pod_changed(live))
        else:
            self._mirror.ledger.handle(Forgotten(uid))
        log.info("bind looked up", extra=fields(pod=entry.holding.name, node=live.node_name if live else None))
        self._verify.discard(uid)

    # ---- pods bound around us ---------------------------------------------------------------------------------------

    def _grant(self, uid: str) -> None:
        """Choose cards on the node where the pod is, and book them before anything is written."""
        pod = self._mirror.ungranted[uid]
        asked = speaking.read_pod(pod, self._mirror.settings)
        fleet = self._mirror.ledger.fleet
        if not isinstance(asked, PodRequest) or pod.node_name not in fleet:
            self._not_before[uid] = self._clock() + AGAIN
            return
        grant = self._booked(uid, pod.node_name)
        if grant is None:
            where = fleet.place(asked, pod.node_name, self._settings.policy, seed_of(uid))
            if not isinstance(where, Placement):
                self._not_before[uid] = self._clock() + AGAIN
                self._no_room(pod, where)
                return
            grant = where.grant(uid, asked.dialect)
        self.carry_out(self._mirror.granted(pod, grant))
        self._unwritten[uid] = grant
        self._metrics.around.inc()
        log.info("granted to a pod bound around us", extra=fields(pod=pod.key, node=pod.node_name))

    def _booked(self, uid: str, node: str) -> Grant | None:
        """Cards that the book has for the pod already: pencilled by filter before kube-scheduler itself bound it."""
        entry = self._mirror.ledger.entry(uid)
        return entry.holding.grant if entry is not None and entry.holding.node == node else None

    def _no_room(self, pod: Pod, refusal: Refusal) -> None:
        said = f"bound to {pod.node_name} by another scheduler, where gputile has no cards for it: {refusal.sentence}"
        self._mirror.suspects[pod.uid] = (pod, said)

    async def _write(self, uid: str) -> None:
        pod, grant = self._mirror.pod(uid), self._unwritten[uid]
        if pod is None or pod.node_name != grant.node:
            del self._unwritten[uid]  # gone, or not where it was
            return
        self._not_before[uid] = self._clock() + AGAIN
        written = self._written(pod, grant)
        if written is not None:
            await self._api.patch_pod(pod.namespace, pod.name, uid, {**written.annotations}, {**written.labels})
        del self._unwritten[uid]

    def _written(self, pod: Pod, grant: Grant) -> Written | None:
        asked = speaking.read_pod(pod, self._mirror.settings)
        node = self._mirror.ledger.fleet.node(grant.node)
        if not isinstance(asked, PodRequest) or node is None:
            return None
        settings = self._mirror.settings
        award = Award(grant=grant, pod=pod, asked=asked, cards=node.cards, at=self._wall(), settings=settings)
        return speaking.write_grant(award)

    # ---- labels that the Binding could not bring --------------------------------------------------------------------

    async def _complete_labels(self, uid: str, pod: Pod) -> None:
        """API servers before 1.35 take only annotations over from a Binding. A label that is there stays as it is."""
        entry = self._mirror.ledger.entry(uid)
        grant = entry.holding.grant if entry is not None else None
        if grant is None or pod.is_admitted or uid in self._unwritten:
            return
        written = self._written(pod, grant)
        missing = {key: value for key, value in (written.labels if written else {}).items() if key not in pod.labels}
        if missing:
            try:
                await self._api.patch_pod(pod.namespace, pod.name, uid, {}, {**missing})
            except (Refused, Unclear):
                self._mirror.fresh[uid] = pod
                raise

    # ---- what people should know ------------------------------------------------------------------------------------

    async def _report(self) -> None:
        for conflict in self._conflicts:
            log.error(
                "more on a card than it has",
                extra=fields(pod=conflict.pod, node=conflict.node, cards=list(conflict.cards)),
            )
        self._conflicts.clear()
        for uid, (pod, why) in list(self._mirror.suspects.items()):
            del self._mirror.suspects[uid]
            if self._reported.get(uid) == why:
                continue
            self._reported[uid] = why
            self._metrics.copied.inc()
            log.warning("a pod's record is not believed", extra=fields(pod=pod.key, node=pod.node_name, why=why))
            note = Note(namespace=pod.namespace, pod=pod.name, uid=uid, reason="GrantNotBelieved", message=why)
            await self._api.note(note)

    def forget_strangers(self) -> None:
        """Drop what is remembered of pods that are gone."""
        for memory in (self._reported, self._not_before):
            for uid in [uid for uid in memory if self._mirror.pod(uid) is None]:
                del memory[uid]
