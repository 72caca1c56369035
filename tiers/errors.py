"""What the store raises. A miss, a refusal, a full tier or a bad chunk is a result, not an error.

TierError
├── StoreLockedError     another process owns the store directory
├── FormatVersionError   the directory was written by a newer rootcellar
└── StoreClosedError     a verb was called after close()

Wrong arguments raise ValueError or TypeError naming the argument, its value and what is allowed.
"""


class TierError(Exception):
    """Base of everything a tier raises on its own account."""


class StoreLockedError(TierError):
    """Another process holds the store directory; the message names its pid."""


class FormatVersionError(TierError):
    """The store directory has a format this version cannot read; it was left untouched."""


class StoreClosedError(TierError):
    """The store was used after close()."""
