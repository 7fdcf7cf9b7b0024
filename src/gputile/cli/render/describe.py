"""What a container asks for and what its pod insists on, in words. Light: every command that shows a pod loads it."""

from gputile.model.requests import Constraints, ContainerRequest, Strength
from gputile.model.units import show_memory


def describe(ask: ContainerRequest) -> str:
    """What one container asks for, in words."""
    if not ask.cards:
        return "no GPU"
    cards = "1 card" if ask.cards == 1 else f"{ask.cards} cards"
    if ask.exclusive and ask.memory is None:
        return f"{cards}, whole, shared with nobody"
    parts = []
    if ask.memory is not None:
        parts.append(show_memory(ask.memory) if ask.memory else "no memory")
    else:
        parts.append("all its memory" if ask.memory_percent == 100 else f"{ask.memory_percent} % of its memory")
    if ask.cores:
        parts.append(f"{ask.cores} % of its cores")
    each = "of it " if ask.cards == 1 else "of each "
    return f"{cards}, {each}{' and '.join(parts)}{', shared with nobody' if ask.exclusive else ''}"


def constraint_lines(rule: Constraints) -> list[str]:
    """The constraints, one sentence each."""
    lines = [f"only models matching {' or '.join(found.names)}" for found in rule.models]
    lines += [f"no models matching {' or '.join(found.names)}" for found in rule.not_models]
    if rule.uuids:
        lines.append(f"only cards {', '.join(sorted(rule.uuids))}")
    if rule.not_uuids:
        lines.append(f"not the cards {', '.join(sorted(rule.not_uuids))}")
    if rule.modes:
        lines.append(f"only cards shared by {' or '.join(sorted(rule.modes))}")
    if rule.numa is not Strength.NO:
        lines.append(f"cards of one NUMA node ({rule.numa})")
    if rule.links is not Strength.NO:
        lines.append(f"linked cards ({rule.links})")
    if rule.idle:
        lines.append("only idle cards")
    if rule.node_policy or rule.card_policy:
        lines.append(f"policy: nodes {rule.node_policy or 'default'}, cards {rule.card_policy or 'default'}")
    return lines
