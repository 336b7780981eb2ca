"""What the counted overlap says about a merge: warnings, and whether RAM suits the agents."""

from __future__ import annotations

from mergekit_ram.report import OverlapReport, share

# An agent that changed this share of what it touched has a dense task vector. Reinforcement
# learning leaves more alone: the paper's agents changed 3.2, 46.2 and 54.3 %.
DENSE = 0.9
# Unique shares of an agent's changes, from benchmarks/agents/README.md: RAM was ahead of every
# baseline with 18 to 27 %, mixed with 4 to 6 % for one agent, and behind with next to nothing.
DISTINCT = 0.15
ALL_SHARED = 0.03


def warnings(report: OverlapReport) -> list[str]:
    """Return a message for each agent that RAM cannot do much with, and why."""
    return [*_unchanged(report), *_dense(report), *_same(report)]


def advice(report: OverlapReport) -> str:
    """Return one line on whether RAM suits these agents."""
    total = report.total
    shares = [
        int(unique) / int(changed)
        for unique, changed in zip(total.unique, total.changed, strict=True)
        if changed
    ]
    if not any(report.takes_part(i) for i in range(len(report.agents))):
        return "No agent takes part, all weights are 0: the merge is the base model."
    if not shares:
        return "No agent changed anything: the merge is the base model."
    if len(shares) == 1:
        return "One agent changed anything: the merge is that agent, and nothing is averaged."
    if max(shares) < ALL_SHARED:
        return (
            "Nearly all changes are shared: RAM is then close to the plain average. On dense toy "
            "agents `task_arithmetic` (weight 0.5) and `ties` (density 0.2) scored 1.3 to 1.4 "
            "points better; see the README, 'Choosing a method'."
        )
    if min(shares) >= DISTINCT and max(total.density) < DENSE:
        return (
            "Sparse and distinct: RAM suits these agents, since it keeps what averaging would "
            "divide. On toy agents like this `ram` was ahead of every baseline."
        )
    return (
        "Some agents have little of their own: on toy agents like this RAM was ahead in some runs "
        "and behind in others. Merge with `ram` and with `task_arithmetic`, and score both."
    )


def _unchanged(report: OverlapReport) -> list[str]:
    total = report.total
    found = []
    for i, agent in enumerate(report.agents):
        if total.changed[i] or not report.takes_part(i):
            continue
        below = int(total.below_epsilon[i])
        how = (
            f"differs from the base model by no more than epsilon ({below:,} elements by less)"
            if below
            else "does not differ from the base model in any element"
        )
        found.append(
            f"{agent} {how}, so it adds nothing to the merge: a failed export, an adapter that was "
            "not merged into it, or the base model itself?"
        )
    return found


def _dense(report: OverlapReport) -> list[str]:
    total = report.total
    found = []
    for i, agent in enumerate(report.agents):
        if total.density[i] >= DENSE:
            where = f"{share(int(total.changed[i]), total.elements)} % of all elements"
        else:
            elements, changed, tensors = _touched(report, i)
            # Some tensors of a sparse agent are dense by chance, norms for instance.
            if not elements or changed / elements < DENSE:
                continue
            where = (
                f"{share(changed, elements)} % of the elements of those tensors ({tensors} of "
                f"{len(report.overlap.tensors)}) that it changed at all"
            )
        unique = share(int(total.unique[i]), int(total.changed[i]))
        found.append(
            f"{agent} changed {where}; {unique} % of its changes are its own. That is a "
            "dense task vector, as of supervised fine-tuning or LoRA, or the wrong base model. "
            "RAM degenerates to averaging where agents are dense."
        )
    return found


def _touched(report: OverlapReport, i: int) -> tuple[int, int, int]:
    """Elements of the tensors that agent ``i`` changed, those changed, and number of tensors."""
    agent = report.overlap.agents[i]
    elements = changed = tensors = 0
    for name, counts in report.overlap.tensors.items():
        if name in report.overlap.copies or agent not in counts.agents:
            continue
        here = int(counts.changed[counts.agents.index(agent)])
        if here:
            elements, changed, tensors = elements + counts.elements, changed + here, tensors + 1
    return elements, changed, tensors


def _same(report: OverlapReport) -> list[str]:
    total = report.total
    names = report.agents
    return [
        f"{names[i]} and {names[j]} changed exactly the same elements: are they one model under "
        "two names? What an agent shares with itself counts as shared."
        for i in range(len(names))
        for j in range(i)
        if 0 < total.changed[i] == total.changed[j] == total.pairs[i, j]
        and total.density[i] < DENSE
    ]
