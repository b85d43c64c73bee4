"""The files of a pipeline's parts on their way to the primary, which alone writes checkpoints, and back."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

import numpy as np

from hvdtrain.comm import Communicator, Message, Post
from hvdtrain.errors import HvdtrainError

#: Bytes of a piece: the primary holds one at a time, however large the model is.
_PIECE = 16 << 20


def gather(mine: Path | None, owners: Sequence[int], comm: Communicator, post: Post | None) -> Path | None:
    """Collective. Move the files of the ``owners``' directories into one of the primary's; its path there, None elsewhere.

    Args:
        mine: this rank's directory, if it is an owner; it is used up.
    """
    rank = comm.world.rank
    into: Path | None = None
    if rank == 0:
        into = mine if mine is not None else Path(tempfile.mkdtemp(prefix="hvdtrain-part-"))
        for owner in owners:
            if owner != rank:
                assert post is not None
                _receive(into, owner, post)
    elif mine is not None:
        assert post is not None
        _send(mine, post)
    return into


def _send(directory: Path, post: Post) -> None:
    for path in sorted(directory.iterdir()):
        with path.open("rb") as file:
            while piece := file.read(_PIECE):
                post.send(Message(path.name, (np.frombuffer(piece, np.uint8),)), 0, 0)
                post.flush()
        path.unlink()
    directory.rmdir()
    post.send(Message(None), 0, 0)


def _receive(directory: Path, owner: int, post: Post) -> None:
    while (message := post.receive(owner, 0, f"rank {owner}'s part of the checkpoint")).about is not None:
        with (directory / str(message.about)).open("ab") as file:
            file.write(message.arrays[0].data)


def spread(directory: Path | None, comm: Communicator) -> Path | None:
    """Collective. Copy the files in the primary's ``directory`` to every rank; where they are, None if there is no directory."""
    names = comm.broadcast(None if directory is None else sorted(each.name for each in directory.iterdir()), name="parts/names")
    if names is None:
        return None
    into = Path(tempfile.mkdtemp(prefix="hvdtrain-part-"))
    for name in names:
        source = None if directory is None else (directory / name).open("rb")
        with (into / name).open("wb") as target:
            while piece := comm.broadcast(_read(source), name="parts/piece"):
                if isinstance(piece, str):
                    raise HvdtrainError(f"{name} of the checkpoint cannot be read: {piece}").everywhere()
                target.write(piece)
        if source is not None:
            source.close()
    return into


def _read(source: BinaryIO | None) -> bytes | str:
    """A piece, or why there is none."""
    if source is None:
        return b""
    try:
        return source.read(_PIECE)
    except OSError as error:
        return error.strerror or str(error)
