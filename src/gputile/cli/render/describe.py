"""What a container requests and what its pod demands, as text. Imported by every command that shows a pod."""

from gputile.model.requests import Constraints, ContainerRequest, Strength
from gputile.model.units import show_memory


def describe(ask: ContainerRequest) -> str:
    """What one container requests: `3 GiB of each of 4 GPUs`."""
    if not ask.cards:
        return "no GPU"
    if ask.exclusive and ask.memory is None:
        return "1 whole GPU, exclusive" if ask.cards == 1 else f"{ask.cards} whole GPUs, exclusive"
    if ask.memory is not None:
        memory = show_memory(ask.memory) if ask.memory else "no memory"
    else:
        memory = "all memory" if ask.memory_percent == 100 else f"{ask.memory_percent} % of the memory"
    cores = f" and {ask.cores} % of the cores" if ask.cores else ""
    gpus = "1 GPU" if ask.cards == 1 else f"each of {ask.cards} GPUs"
    return f"{memory}{cores} of {gpus}{', exclusive' if ask.exclusive else ''}"


def constraint_lines(rule: Constraints) -> list[str]:
    """The constraints, one line each."""
    lines = [f"only models matching {' or '.join(models.names)}" for models in rule.models]
    lines += [f"no models matching {' or '.join(models.names)}" for models in rule.not_models]
    if rule.uuids:
        lines.append(f"only GPUs {', '.join(sorted(rule.uuids))}")
    if rule.not_uuids:
        lines.append(f"not the GPUs {', '.join(sorted(rule.not_uuids))}")
    if rule.modes:
        lines.append(f"only GPUs shared by {' or '.join(sorted(rule.modes))}")
    if rule.numa is not Strength.NO:
        lines.append(f"GPUs of one NUMA node ({rule.numa})")
    if rule.links is not Strength.NO:
        lines.append(f"linked GPUs ({rule.links})")
    if rule.idle:
        lines.append("only idle GPUs")
    if rule.node_policy or rule.card_policy:
        lines.append(f"policy: nodes {rule.node_policy or 'default'}, GPUs {rule.card_policy or 'default'}")
    return lines
