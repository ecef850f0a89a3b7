"""A copy of a version's files into the staging buffer, made while its trainer still writes them: what is loaded is what
was proved there.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from refitd_plugin.moves import MemoryMove
from refitd_plugin.staging import FileOnDevice
from refitd_plugin.trainer_follower import Files, Layout

Take = Callable[[Mapping[str, tuple[int, int]]], dict[str, FileOnDevice] | None]


@dataclass(slots=True, kw_only=True)
class BufferCopy:
    """The copy of a version's files to `places` in the buffer, as far as it was begun; `begin_move` begins a part of
    it: a move, and the address that its source is counted from.
    """

    files: Files
    layout: Layout
    places: dict[str, FileOnDevice]
    begin_move: Callable[[MemoryMove, int], None]
    _begun: dict[str, int] = field(init=False)

    def __post_init__(self) -> None:
        self._begun = dict.fromkeys(self.layout, 0)

    def is_of(self, files: Files, layout: Layout) -> bool:
        return self.layout == layout and all(self.files[name] is files[name] for name in layout)

    def advance(self, name: str, end: int) -> None:
        begin, end = self._begun[name], min(end, self.layout[name].size)
        if end > begin:
            self.begin_move(MemoryMove(self.places[name].address + begin, begin, end - begin), self.files[name].address)
            self._begun[name] = end

    def finish(self) -> None:
        for name, file in self.layout.items():
            self.advance(name, file.size)

    def drop(self) -> None:
        self.taken()

    def taken(self) -> dict[str, FileOnDevice]:
        """The places, which this copy, and who still has it, keeps no longer."""
        places, self.places = self.places, {}
        return places

    @property
    def begun(self) -> int:
        return sum(self._begun.values())

    @property
    def is_whole(self) -> bool:
        return all(self._begun[name] >= file.size for name, file in self.layout.items())


def buffer_copy(
    files: Files, layout: Layout, take: Take, begin_move: Callable[[MemoryMove, int], None]
) -> BufferCopy | None:
    """A copy that was not begun; None where the buffer is in use, or there is no room.

    Args:
        files: the files.
        layout: theirs.
        take: gives room in the staging buffer, for the size of each file and the byte where its tensors begin.
        begin_move: as in `BufferCopy`.
    """
    places = take({name: (file.size, file.begin) for name, file in layout.items()})
    if places is None:
        return None
    return BufferCopy(files=files, layout=layout, places=places, begin_move=begin_move)
