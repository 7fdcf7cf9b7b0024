"""`gputile version`: the versions of this program, the scheduler and Kubernetes."""

from typing import Any

import click

from gputile import __version__
from gputile.cli.output import say
from gputile.cli.render.terminal import PROGRAMS, emit, output_option

EPILOG = """\b
Examples:
  gputile version               this program, the scheduler and the cluster
  gputile version --client      this program alone, without a cluster
  gputile version -o json

\b
Exit codes: 0 always, except for wrong usage (2). What cannot be read is reported on stderr.
"""

SCHEDULER = "/apis/apps/v1/namespaces/kube-system/deployments/gputile-scheduler"


@click.command("version", epilog=EPILOG)
@click.option("--client", is_flag=True, help="Contact no cluster.")
@output_option()
@click.option("--context", help="Context in the kubeconfig. [default: the current context]")
@click.option(
    "--kubeconfig",
    metavar="FILE",
    help="Kubeconfig file. [default: $KUBECONFIG, the pod's service account, ~/.kube/config]",
)
def command(client: bool, output: str, kubeconfig: str | None, context: str | None) -> None:
    """Show the versions of this program, the scheduler and Kubernetes."""
    versions: dict[str, str | None] = {"gputile": __version__}
    if not client:
        versions |= _cluster_versions(kubeconfig, context)
    if output in PROGRAMS:
        emit(versions, output)
        return
    width = max(map(len, versions)) + 2
    for name, version in versions.items():
        say(f"{name:<{width}}{version or 'unknown'}")


def _cluster_versions(kubeconfig: str | None, context: str | None) -> dict[str, str | None]:
    from gputile.cli.source import ClusterSource, UnreadableKind, warn_fallback
    from gputile.model.errors import InputError

    versions: dict[str, str | None] = {"scheduler": None, "kubernetes": None}
    try:
        answers = ClusterSource(kubeconfig=kubeconfig, context=context).get(
            {"scheduler": SCHEDULER, "kubernetes": "/version"}
        )
    except InputError as error:
        warn_fallback(f"no cluster was contacted: {error}")
        return versions
    for name, answer in answers.items():
        if isinstance(answer, UnreadableKind):
            subject = "Kubernetes" if name == "kubernetes" else f"the {name}"
            warn_fallback(f"the version of {subject} cannot be read: {answer.why}")
    kubernetes = answers["kubernetes"]
    if isinstance(kubernetes, dict):
        versions["kubernetes"] = kubernetes.get("gitVersion")
    if answers["scheduler"] is None:
        versions["scheduler"] = "not installed in kube-system"
    elif isinstance(answers["scheduler"], dict):
        versions["scheduler"] = _image(answers["scheduler"])
    return versions


def _image(deployment: Any) -> str | None:
    """The tag of the image, which is the version that the Deployment wants."""
    containers = (((deployment.get("spec") or {}).get("template") or {}).get("spec") or {}).get("containers") or ()
    image = str(containers[0].get("image") or "") if containers else ""
    name = image.rpartition("/")[2]
    return name.partition(":")[2] or name or None
