from pathlib import Path

import pytest
import torch

from rootcellar.bench import device_interference
from rootcellar.bench.device_budget import Part
from rootcellar.bench.device_decode import DecodeLoop
from rootcellar.bench.device_interference import ALONE, CONTROL, OFF, ON, Block, findings_of
from rootcellar.bench.device_scale import DRY
from rootcellar.bench.device_section import Site
from rootcellar.tiers.movers import Batch, InPlace, Lane


def blocks(*medians_s: float, slowest_s: float, written_bytes: int = 0) -> list[Block]:
    """One for each median, of 99 equal steps and two slow ones."""
    return [Block([median] * 99 + [slowest_s] * 2, written_bytes) for median in medians_s]


def test_blocks_are_compared_within_their_round_and_slow_steps_over_all() -> None:
    found = findings_of(
        {
            OFF: blocks(1.0, 2.0, 4.0, slowest_s=10.0),
            ON: blocks(1.1, 2.2, 4.0, slowest_s=20.0, written_bytes=10**9),
            CONTROL: blocks(1.0, 2.0, 4.2, slowest_s=10.0),
            ALONE: [Block([1.0], 5 * 10**9)],
        }
    )
    median, p99 = found.targets
    assert median.measured == pytest.approx(1.1)
    assert p99.measured == pytest.approx(2.0)
    off, on, control, alone = found.rows
    assert off["to_off"] == 1.0
    assert (on["to_off_min"], on["to_off_max"]) == pytest.approx((1.0, 1.1))
    assert control["to_off_max"] == pytest.approx(1.05)
    assert on["written_gb_per_s"] == pytest.approx(3 / (99 * 7.3 + 6 * 20))
    assert alone["written_gb_per_s"] == pytest.approx(5)
    assert alone.keys() == on.keys()


def test_chunks_are_written_only_while_write_down_is_on() -> None:
    site = Site(device=torch.device("cpu"), directory=Path(), seed=0, scale=DRY)
    found = device_interference.measure(site, Part(0, lambda fraction: None))
    written = {row["measured"]: row["written_gb_per_s"] for row in found.rows}
    assert written[OFF] == written[CONTROL] == 0
    assert written[ON] > 0
    assert written[ALONE] > 0


def test_a_store_that_fails_is_no_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: InPlace, lane: Lane, batch: Batch) -> None:
        raise RuntimeError("the link is down")

    monkeypatch.setattr(InPlace, "store", refuse)
    site = Site(device=torch.device("cpu"), directory=Path(), seed=0, scale=DRY)
    with pytest.raises(RuntimeError, match="the link is down"):
        device_interference.measure(site, Part(0, lambda fraction: None))


def test_a_decode_step_attends_like_every_head_with_the_kv_of_its_group() -> None:
    loop = DecodeLoop(DRY.decode, torch.Generator().manual_seed(0))
    shape, layer = DRY.decode, loop._layers[0]
    tokens = torch.randn(shape.batch, shape.hidden)
    found = layer._attend(tokens)
    made = (tokens @ layer._to_heads.T).view(shape.batch, -1, shape.head_dim)
    repeats = shape.num_heads // shape.num_kv_heads
    keys, values = (states.repeat_interleave(repeats, 1) for states in (layer._keys, layer._values))
    queries = made[:, : shape.num_heads, None]
    weights = (queries @ keys.transpose(2, 3) / shape.head_dim**0.5).softmax(-1)
    torch.testing.assert_close(found, (weights @ values).reshape(shape.batch, -1))
    new_keys = made[:, shape.num_heads : shape.num_heads + shape.num_kv_heads]
    assert torch.equal(layer._keys[:, :, -1], new_keys)
