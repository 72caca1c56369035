"""What came to and left each tier, for whoever tracks from outside what may be found here."""

from dataclasses import dataclass

from ..admission.base import Key, Tier


@dataclass(frozen=True, slots=True)
class ChunkEvent:
    """`key` can be had from `tier` from now on, or (not stored) no longer."""

    key: Key
    tier: Tier
    stored: bool


class EventLog:
    """Off until start(). Who replays what take() gives never believes in a chunk that is gone.

    While max_events wait to be taken, arrivals are not told, and neither are their departures: the
    picture is then incomplete, never wrong. Departures are always told, so a log that nobody takes
    holds max_events and as many as the tiers hold chunks, no more.
    """

    def __init__(self) -> None:
        self.on = False
        self._max_events = 0
        self._events: list[ChunkEvent] = []
        self._told: dict[Tier, set[Key]] = {tier: set() for tier in Tier}

    def start(self, max_events: int) -> None:
        """Begin with an empty picture. ValueError unless max_events is at least 1."""
        if max_events < 1:
            raise ValueError(f"max_events is {max_events}, must be at least 1")
        self.on = True
        self._max_events = max_events
        self._events = []
        self._told = {tier: set() for tier in Tier}

    def stored(self, tier: Tier, key: Key) -> None:
        if self.on and len(self._events) < self._max_events:
            assert key not in self._told[tier], "a chunk came to a tier that had it"
            self._told[tier].add(key)
            self._events.append(ChunkEvent(key, tier, True))

    def removed(self, tier: Tier, key: Key) -> None:
        if self.on and key in self._told[tier]:
            self._told[tier].remove(key)
            self._events.append(ChunkEvent(key, tier, False))

    def take(self) -> list[ChunkEvent]:
        """The events since the last call, oldest first. For one (key, tier) they alternate."""
        events, self._events = self._events, []
        return events
