"""One rank's instructions of a schedule, done with a framework's part of the model and messages to the neighbours."""

from __future__ import annotations

from dataclasses import dataclass

from hvdtrain.comm import Message, Post
from hvdtrain.pipeline.part import Part
from hvdtrain.pipeline.schedule import Instruction, Name, schedule


@dataclass(frozen=True)
class Route:
    """Where a rank's messages go.

    Attributes:
        ranks: of this pipeline, by stage.
        stage: this rank's.
        chunks: virtual stages on each rank.
    """

    ranks: tuple[int, ...]
    stage: int
    chunks: int

    def other(self, instruction: Instruction, micros: int) -> tuple[int, int]:
        """The rank that a message comes from or goes to, and its tag, which both sides compute alike."""
        stages = len(self.ranks)
        virtual = instruction.chunk * stages + self.stage
        forward = instruction.kind.endswith("activation")
        # The boundary between two virtual stages has the number of the second.
        boundary = virtual + (instruction.kind in ("send_activation", "receive_gradient"))
        step = 1 if instruction.kind in ("send_activation", "receive_gradient") else -1
        tag = 2 * (boundary * micros + instruction.micro) + (0 if forward else 1)
        return self.ranks[(virtual + step) % stages], tag


def run(part: Part, name: Name, micros: int, route: Route, post: Post | None) -> None:
    """Collective over the pipeline. All of this rank's instructions, in order."""
    stages = len(route.ranks)
    instructions = list(schedule(name, route.stage, stages, micros, route.chunks))
    if post is None:
        assert stages == 1, "stages need messages"
    else:
        post.expect([route.other(each, micros) for each in instructions if each.kind.startswith("receive")])
    message: Message | None = None
    for each in instructions:
        if each.kind == "forward":
            message = part.forward(each.chunk, each.micro, message)
        elif each.kind == "backward":
            message = part.backward(each.chunk, each.micro, message)
        elif post is not None:
            other, tag = route.other(each, micros)
            if each.kind.startswith("send"):
                assert message is not None
                post.send(message, other, tag)
                message = None
            else:
                what = "activations" if each.kind == "receive_activation" else "gradients"
                message = post.receive(other, tag, f"the {what} of micro-batch {each.micro} from rank {other}")
