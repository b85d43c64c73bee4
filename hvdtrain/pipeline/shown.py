"""How a model was split, for people."""

from __future__ import annotations

from collections.abc import Sequence

from hvdtrain.pipeline.mesh import Mesh
from hvdtrain.pipeline.part import Cost
from hvdtrain.pipeline.wanted import Pipelining


def text(mesh: Mesh, wanted: Pipelining, costs: Sequence[Cost], bounds: Sequence[int]) -> str:
    """How the model was split: a line for each stage."""
    if wanted.stages == 1:
        return ""
    replicas = f" x {mesh.replicas} replicas" if mesh.replicas > 1 else ""
    lines = [f"pipeline of {wanted.stages} stages{replicas}, {wanted.schedule}, split by {wanted.split}"]
    whole = sum(cost.parameters for cost in costs) or 1
    weights = []
    for stage, ranks in enumerate(mesh.sets):
        chunks = [range(bounds[number], bounds[number + 1]) for number in range(stage, len(bounds) - 1, wanted.stages)]
        mine = [costs[layer] for chunk in chunks for layer in chunk]
        weights.append(sum(wanted.weight(cost) for cost in mine))
        layers = ", ".join(f"{chunk[0]} to {chunk[-1]}" if len(chunk) > 1 else f"{chunk[0]}" for chunk in chunks)
        size = sum(cost.parameters for cost in mine)
        line = f"  stage {stage} on rank {', '.join(map(str, ranks))}: layers {layers}"
        line += f", {size / 1e6:,.2f} MB of parameters ({size / whole:.0%})"
        if any(cost.seconds for cost in costs):
            seconds, kept = sum(cost.seconds for cost in mine), sum(cost.activations for cost in mine)
            line += f"; a micro-batch takes {1e3 * seconds:.3g} ms and {kept / 1e6:,.2f} MB"
        lines.append(line)
    if mean := sum(weights) / len(weights):
        lines[0] += f": the largest has {max(weights) / mean:.2f} of the mean"
    return "\n".join(lines)
