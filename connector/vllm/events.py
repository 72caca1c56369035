"""Which chunks came and went, as vLLM's KV events: routers that place requests by their prefixes
listen to them. Off unless vLLM publishes events."""

from collections.abc import Iterable

from vllm.v1.kv_offload.base import Medium, OffloadingEvent, OffloadKey

from ...tiers.base import Key, Tier
from ...tiers.store import TieredStore
from .names import NameBook

_MEDIUM = {Tier.DRAM: Medium.CPU, Tier.NVME: Medium.STORAGE}


class Events:
    """Collects from the store; nothing at all when not enabled."""

    def __init__(self, store: TieredStore, enabled: bool) -> None:
        self._store = store
        self._book = NameBook()
        self._enabled = enabled
        self._nameless: set[Key] = set()  # on NVMe since an earlier start, by our name alone
        self._late: list[OffloadKey] = []  # of these, what got its name since
        if enabled:
            store.record_events()

    def name(self, keys: Iterable[Key], offload_keys: Iterable[OffloadKey]) -> None:
        """vLLM knows these chunks by these names."""
        if not self._enabled:
            return
        ours, theirs = list(keys), list(offload_keys)
        self._book.write(ours, theirs)
        if self._nameless:
            named = [(k, name) for k, name in zip(ours, theirs, strict=True) if k in self._nameless]
            self._late += [name for _, name in named]
            self._nameless.difference_update(k for k, _ in named)

    def take(self) -> Iterable[OffloadingEvent]:
        """One event per run of chunks that share a medium and a direction, in the order of time.

        A chunk of an earlier start is told of when a request first names it.
        """
        if not self._enabled:
            return
        late, self._late = self._late, []
        yield from _event(late, (Tier.NVME, True))
        run: list[OffloadKey] = []
        kind: tuple[Tier, bool] | None = None
        for event in self._store.take_events():
            offload_key = self._book.offload_key(event.key)
            if offload_key is None:
                (self._nameless.add if event.stored else self._nameless.discard)(event.key)
                continue
            if (event.tier, event.stored) != kind:
                yield from _event(run, kind)
                run, kind = [], (event.tier, event.stored)
            run.append(offload_key)
        yield from _event(run, kind)


def _event(keys: list[OffloadKey], kind: tuple[Tier, bool] | None) -> Iterable[OffloadingEvent]:
    if kind is not None and keys:
        tier, stored = kind
        yield OffloadingEvent(
            keys=keys, medium=_MEDIUM[tier], removed=not stored, removal_expected=stored
        )
