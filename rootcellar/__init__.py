"""rootcellar: a tiered KV-cache store for LLM inference.

Everything public is here, imported when first asked for, so that reading one part (an index, a
worker process) does not load the others' torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .admission.always import Always
    from .admission.base import (
        AdmissionPolicy,
        Answer,
        Boundary,
        Decision,
        EvictionOrder,
        Offer,
        Tier,
    )
    from .admission.frequency_gate import FrequencyGate
    from .admission.gated import Gated
    from .admission.learned.policy import Learned
    from .admission.lru import LruOrder
    from .admission.write_budget import WriteBudget
    from .tiers.base import Load, LoadState, Lookup, StoreJob
    from .tiers.config import StoreConfig
    from .tiers.errors import (
        FormatVersionError,
        StoreClosedError,
        StoreLockedError,
        TierError,
    )
    from .tiers.keys import chunk_keys, extend_keys
    from .tiers.layout import KVLayout, Namespace
    from .tiers.pages import PagePool
    from .tiers.radix import Match, RadixTree
    from .tiers.store import TieredStore

__version__ = "0.1.0"

__all__ = [
    "AdmissionPolicy",
    "Always",
    "Answer",
    "Boundary",
    "Decision",
    "EvictionOrder",
    "FormatVersionError",
    "FrequencyGate",
    "Gated",
    "KVLayout",
    "Learned",
    "Load",
    "LoadState",
    "Lookup",
    "LruOrder",
    "Match",
    "Namespace",
    "Offer",
    "PagePool",
    "RadixTree",
    "StoreClosedError",
    "StoreConfig",
    "StoreJob",
    "StoreLockedError",
    "Tier",
    "TierError",
    "TieredStore",
    "WriteBudget",
    "__version__",
    "chunk_keys",
    "extend_keys",
]

_HOMES = {
    "admission.always": ["Always"],
    "admission.base": [
        "AdmissionPolicy",
        "Answer",
        "Boundary",
        "Decision",
        "EvictionOrder",
        "Offer",
        "Tier",
    ],
    "admission.frequency_gate": ["FrequencyGate"],
    "admission.gated": ["Gated"],
    "admission.learned.policy": ["Learned"],
    "admission.lru": ["LruOrder"],
    "admission.write_budget": ["WriteBudget"],
    "tiers.base": ["Load", "LoadState", "Lookup", "StoreJob"],
    "tiers.config": ["StoreConfig"],
    "tiers.errors": ["FormatVersionError", "StoreClosedError", "StoreLockedError", "TierError"],
    "tiers.keys": ["chunk_keys", "extend_keys"],
    "tiers.layout": ["KVLayout", "Namespace"],
    "tiers.pages": ["PagePool"],
    "tiers.radix": ["Match", "RadixTree"],
    "tiers.store": ["TieredStore"],
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> object:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(import_module(f".{_HOME_OF[name]}", __name__), name)
    globals()[name] = value  # the next access does not come here
    return value


def __dir__() -> list[str]:
    return __all__
