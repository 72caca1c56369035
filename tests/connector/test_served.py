"""The account of a request adds up, and its first token is the first."""

import torch

from rootcellar.connector.served import FirstToken, Served
from rootcellar.tiers.base import Tier


def test_what_no_tier_served_was_computed() -> None:
    served = Served.of(100, {Tier.HBM: 30, Tier.NVME: 20}, ttft_s=0.5)
    assert served == Served(hbm=30, dram=0, nvme=20, computed=50, ttft_s=0.5)


def test_the_first_token_is_noted_once_and_stops_nothing() -> None:
    steps: list[float] = []
    first_token = FirstToken(each_step=lambda: steps.append(first_token.at_s))
    assert not first_token.at_s
    tokens = torch.ones((1, 5), dtype=torch.long)
    assert not first_token(tokens, None).any()
    noted_s = first_token.at_s
    assert noted_s > 0
    assert not first_token(tokens, None).any()
    assert first_token.at_s == noted_s
    assert steps == [noted_s, noted_s]
