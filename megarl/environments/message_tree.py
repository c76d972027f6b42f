"""Keep the messages of many chats as a tree, in which beginnings that they share are kept once."""

from collections.abc import Sequence

from megarl.environments.chat_requests import Said


class MessageTree:
    """The messages of chats; each has a place, a number, by which all before it are found. The root's is 0."""

    def __init__(self) -> None:
        self._places: dict[tuple[int, Said], int] = {}
        self._nodes: list[tuple[int, Said]] = []

    def add(self, said: Said, above: int) -> int:
        """Return the place of a message that follows another one's, a new place if it has none."""
        if (place := self._places.get((above, said))) is None:
            self._nodes.append((above, said))
            place = self._places[above, said] = len(self._nodes)
        return place

    def known(self, chat: Sequence[Said]) -> list[int]:
        """Return the places of those first messages of a chat that are known, after that of the root."""
        places = [0]
        for said in chat:
            if (place := self._places.get((places[-1], said))) is None:
                break
            places.append(place)
        return places

    def chat_to(self, place: int) -> list[Said]:
        """Return all messages up to the one at a place."""
        chat = []
        while place:
            place, said = self._nodes[place - 1]
            chat.append(said)
        return chat[::-1]
