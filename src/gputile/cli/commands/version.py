"""`gputile version`: of this program, of the scheduler, of Kubernetes."""

from typing import Any

import click

from gputile import __version__
from gputile.cli.output import say
from gputile.cli.render.terminal import PROGRAMS, emit, output_option

EPILOG = """\b
Examples:
  gputile version               this program, the scheduler and the cluster
  gputile version --client      this program alone, without asking a cluster
  gputile version -o json

\b
Exit codes: 0 always, but for wrong usage (2). What cannot be found out is said on stderr.
"""

SCHEDULER = "/apis/apps/v1/namespaces/kube-system/deployments/gputile-scheduler"


@click.command("version", epilog=EPILOG)
@click.option("--client", is_flag=True, help="Ask no cluster.")
@output_option()
@click.option("--context", help="The context in the kubeconfig. [default: its current one]")
@click.option("--kubeconfig", metavar="FILE", help="[default: $KUBECONFIG, the pod's account, ~/.kube/config]")
def command(client: bool, output: str, kubeconfig: str | None, context: str | None) -> None:
    """The versions of this program, the scheduler and the cluster."""
    found: dict[str, str | None] = {"gputile": __version__}
    if not client:
        found |= _of_the_cluster(kubeconfig, context)
    if output in PROGRAMS:
        emit(found, output)
        return
    width = max(map(len, found)) + 2
    for name, said in found.items():
        say(f"{name:<{width}}{said or 'unknown'}")


def _of_the_cluster(kubeconfig: str | None, context: str | None) -> dict[str, str | None]:
    from gputile.cli.source import ClusterSource, UnreadableKind, fell_back
    from gputile.model.errors import InputError

    names: dict[str, str | None] = {"scheduler": None, "kubernetes": None}
    try:
        answers = ClusterSource(kubeconfig=kubeconfig, context=context).get(
            {"scheduler": SCHEDULER, "kubernetes": "/version"}
        )
    except InputError as wrong:
        fell_back(f"no cluster was asked: {wrong}")
        return names
    for what, answer in answers.items():
        if isinstance(answer, UnreadableKind):
            whose = "Kubernetes" if what == "kubernetes" else f"the {what}"
            fell_back(f"the version of {whose} cannot be read: {answer.why}")
    kubernetes = answers["kubernetes"]
    if isinstance(kubernetes, dict):
        names["kubernetes"] = kubernetes.get("gitVersion")
    if answers["scheduler"] is None:
        names["scheduler"] = "not installed in kube-system"
    elif isinstance(answers["scheduler"], dict):
        names["scheduler"] = _image(answers["scheduler"])
    return names


def _image(deployment: Any) -> str | None:
    """An image's tag is the version that was meant to run."""
    containers = (((deployment.get("spec") or {}).get("template") or {}).get("spec") or {}).get("containers") or ()
    image = str(containers[0].get("image") or "") if containers else ""
    name = image.rpartition("/")[2]
    return name.partition(":")[2] or name or None
