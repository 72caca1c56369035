"""Keep no prefix that is too short to be worth loading: prefilling a few chunks is quick, and short
prompts come in crowds."""

from .base import Answer, Decision, Offer


class MinLength:
    """min_chunks: chunks that a chain must have for any of it to be admitted."""

    def __init__(self, min_chunks: int) -> None:
        if min_chunks < 1:
            raise ValueError(f"min_chunks is {min_chunks}, must be at least 1")
        self._min_chunks = min_chunks

    def decide(self, offer: Offer) -> Decision:
        """offer.chain is taken to begin with its head."""
        length = len(offer.chain)
        if length >= self._min_chunks:
            return Decision(Answer.ADMIT, length)
        chunks = "chunk" if length == 1 else "chunks"
        reason = f"prefix of {length} {chunks}, at least {self._min_chunks} are kept"
        return Decision(Answer.REJECT, offer.start, reason)
