"""The contract that every tier passes, whatever it is made of: subclass and say how to make one.

A chain is a path of small numbers: equal leading numbers are a shared prefix. The content of a
chunk follows from its path, so that every byte read can be checked. Needs pytest to run.
"""

import random
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager

from .toy import Path, content_of


class TierHarness(ABC):
    """One tier behind the few verbs the contract needs; whatever waits, waits inside."""

    chunk_bytes: int

    @abstractmethod
    def offer(self, path: Path) -> None:
        """Offer every chunk of the path that is not held, with its content_of()."""

    @abstractmethod
    def held(self, path: Path) -> int:
        """Length of the leading run that the tier holds."""

    @abstractmethod
    def read(self, path: Path) -> list[bytes]:
        """The leading run itself, read from the medium; counts as a use."""

    @abstractmethod
    @contextmanager
    def pinned(self, path: Path) -> Iterator[int]:
        """Holds the leading run pinned; gives its length."""

    @abstractmethod
    def num_held(self) -> int:
        """Chunks held by the tier's own account."""

    @abstractmethod
    def check_integrity(self) -> None: ...

    @abstractmethod
    def close(self) -> None: ...


class TierContract(ABC):
    @abstractmethod
    def make_tier(self, num_chunks: int) -> TierHarness:
        """A tier with room for exactly `num_chunks`."""

    @contextmanager
    def tier(self, num_chunks: int) -> Iterator[TierHarness]:
        tier = self.make_tier(num_chunks)
        try:
            yield tier
            tier.check_integrity()
        finally:
            tier.close()

    def test_an_empty_tier_serves_nothing(self) -> None:
        with self.tier(4) as tier:
            assert tier.num_held() == 0
            assert tier.read((1, 2)) == []

    def test_what_was_offered_is_read_back_byte_for_byte(self) -> None:
        with self.tier(4) as tier:
            tier.offer((1, 2, 3))
            _read_and_check(tier, (1, 2, 3), at_least=3)

    def test_a_shared_prefix_is_held_once_and_served_to_both(self) -> None:
        with self.tier(8) as tier:
            tier.offer((1, 2, 3))
            tier.offer((1, 2, 4))
            assert tier.num_held() == 4
            _read_and_check(tier, (1, 2, 3), at_least=3)
            _read_and_check(tier, (1, 2, 4), at_least=3)

    def test_another_chain_is_never_served(self) -> None:
        with self.tier(4) as tier:
            tier.offer((1, 2))
            assert tier.held((1, 3)) == 1
            assert tier.read((2, 2)) == []

    def test_offering_again_changes_nothing(self) -> None:
        with self.tier(4) as tier:
            for _ in range(3):
                tier.offer((1, 2, 3))
            assert tier.num_held() == 3

    def test_the_budget_holds_and_the_newest_stays(self) -> None:
        with self.tier(4) as tier:
            for head in range(10):
                tier.offer((head, 1))
                assert tier.num_held() <= 4
            _read_and_check(tier, (9, 1), at_least=2)

    def test_a_tail_goes_before_its_head(self) -> None:
        with self.tier(4) as tier:
            tier.offer((1, 2, 3))
            tier.offer((4, 5))
            assert tier.held((4, 5)) == 2
            assert tier.held((1, 2, 3)) == 2

    def test_what_was_used_last_goes_last(self) -> None:
        with self.tier(4) as tier:
            tier.offer((1, 1))
            tier.offer((2, 2))
            tier.read((1, 1))
            tier.offer((3, 3))
            assert tier.held((1, 1)) == 2
            assert tier.held((2, 2)) == 0

    def test_a_pinned_run_is_never_evicted(self) -> None:
        with self.tier(4) as tier:
            tier.offer((1, 2, 3))
            with tier.pinned((1, 2, 3)) as pinned:
                assert pinned == 3
                for head in range(4, 9):
                    tier.offer((head,))
                assert tier.held((1, 2, 3)) == 3
            _read_and_check(tier, (1, 2, 3), at_least=3)

    def test_a_chain_longer_than_the_tier_is_held_from_its_head(self) -> None:
        with self.tier(3) as tier:
            tier.offer((1, 2, 3, 4, 5))
            assert tier.num_held() <= 3
            _read_and_check(tier, (1, 2, 3, 4, 5), at_least=tier.num_held())

    def test_random_traffic_serves_only_right_bytes(self) -> None:
        rng = random.Random(0)
        with self.tier(5) as tier:
            for _ in range(120):
                path = tuple(rng.randrange(3) for _ in range(rng.randint(1, 5)))
                if rng.random() < 0.5:
                    tier.offer(path)
                else:
                    _read_and_check(tier, path, at_least=tier.held(path))
                assert tier.num_held() <= 5
                tier.check_integrity()


def _read_and_check(tier: TierHarness, path: Path, at_least: int) -> None:
    chunks = tier.read(path)
    assert len(chunks) >= at_least
    for index, chunk in enumerate(chunks):
        assert chunk == content_of(path[: index + 1], tier.chunk_bytes), f"chunk {index} is wrong"
