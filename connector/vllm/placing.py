"""Where the chunks that vLLM names belong: on a request's chain, or beside it."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from vllm.v1.kv_offload.base import OffloadKey, ReqContext, get_offload_group_idx

from ...tiers.base import Key
from .requests import RequestState
from .shape import Shape


@dataclass(frozen=True, slots=True)
class Placed:
    """keys: ours, in vLLM's order. main: which run of the chain is among them, as indices."""

    keys: Sequence[Key]
    main: range
    beside: dict[int, dict[Key, Key]] = field(default_factory=dict[int, dict[Key, Key]])
    """By group: its keys, each with the one of the chain for the same tokens."""

    @property
    def others(self) -> Iterator[Key]:
        """The keys that are not on the chain."""
        return (key for hanging in self.beside.values() for key in hanging)


def place(
    shape: Shape, state: RequestState, offload_keys: Sequence[OffloadKey], context: ReqContext
) -> Placed:
    """What lies before the chain's first chunk, or behind a gap in it, has no place. Where hits are
    windows and there is no chain, everything is beside it."""
    chain, position, tokens = state.chain, context.get_offload_key_position, shape.chunk_tokens
    first, last = (position(offload_keys[i]) // tokens - 1 for i in (0, -1))
    if shape.is_one_chain and last - first == len(offload_keys) - 1:  # the usual case, and fast
        assert chain[last] == state.names.key(offload_keys[-1]), "vLLM says another position"
        return Placed(chain[first : last + 1], range(first, last + 1))
    main: list[int] = []
    placed = Placed([state.names.key(key) for key in offload_keys], range(0))
    for offload_key, key in zip(offload_keys, placed.keys, strict=True):
        index = position(offload_key) // tokens - 1
        if not 0 <= index < len(chain):
            continue
        if chain[index] != key or not shape.has_chain:
            group_id = get_offload_group_idx(offload_key)
            placed.beside.setdefault(group_id, {})[key] = chain[index]
        elif not main or index == main[-1] + 1:
            main.append(index)
    run = range(main[0], main[-1] + 1) if main else range(0)
    return Placed(placed.keys, run, placed.beside)
