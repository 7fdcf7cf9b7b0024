"""The collector of findings and remarks."""

from gputile.audit.objects import AuditedPod
from gputile.audit.report import FindingCode, GpuHolder, Notice
from gputile.model.cards import Card


class Notices:
    """Findings and remarks of one audit, in the order in which they were made."""

    def __init__(self) -> None:
        self.findings: list[Notice] = []
        self.remarks: list[Notice] = []

    def find(
        self,
        code: FindingCode,
        what: str,
        todo: str,
        *,
        node: str = "",
        card: Card | None = None,
        holders: tuple[GpuHolder, ...] = (),
    ) -> None:
        self.findings.append(Notice(code=code, what=what, todo=todo, node=node, card=card, holders=holders))

    def remark(
        self,
        code: FindingCode,
        what: str,
        *,
        node: str = "",
        card: Card | None = None,
        holders: tuple[GpuHolder, ...] = (),
    ) -> None:
        self.remarks.append(Notice(code=code, what=what, node=node, card=card, holders=holders))

    def find_in(self, pod: AuditedPod, code: FindingCode, what: str, todo: str) -> None:
        self.findings.append(Notice(code=code, what=what, todo=todo, node=pod.node, pod=pod.key))

    def remark_in(self, pod: AuditedPod, code: FindingCode, what: str) -> None:
        self.remarks.append(Notice(code=code, what=what, node=pod.node, pod=pod.key))
