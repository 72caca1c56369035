"""An adapter is what its files are, not what it is called."""

import os
from pathlib import Path

from vllm.lora.request import LoRARequest

from rootcellar.connector.vllm.adapters import Adapters


def adapter_at(path: Path, text: str = "weights") -> LoRARequest:
    path.mkdir(exist_ok=True)
    (path / "adapter_model.safetensors").write_text(text)
    os.utime(path / "adapter_model.safetensors", ns=(1, 1))
    return LoRARequest(lora_name="a", lora_int_id=1, lora_path=str(path))


def test_the_same_files_give_the_same_salt_in_every_process(tmp_path: Path) -> None:
    request = adapter_at(tmp_path / "a")
    assert Adapters().salt(request) == Adapters().salt(request)


def test_an_adapter_trained_in_place_gives_another(tmp_path: Path) -> None:
    request = adapter_at(tmp_path / "a")
    before = Adapters().salt(request)
    (tmp_path / "a" / "adapter_model.safetensors").write_text("changed")
    assert Adapters().salt(request) != before


def test_vllm_reads_an_adapter_once_and_so_do_we(tmp_path: Path) -> None:
    """What is in memory goes on being served after the files have changed, until a reload."""
    adapters, request = Adapters(), adapter_at(tmp_path / "a")
    before = adapters.salt(request)
    (tmp_path / "a" / "adapter_model.safetensors").write_text("changed")
    assert adapters.salt(request) == before
    request.load_inplace = True
    assert adapters.salt(request) != before


def test_an_adapter_out_of_sight_is_good_for_one_process(tmp_path: Path) -> None:
    request = LoRARequest(lora_name="a", lora_int_id=1, lora_path="somewhere/on-the-hub")
    adapters = Adapters()
    assert adapters.salt(request) == adapters.salt(request)
    assert adapters.salt(request) != Adapters().salt(request)
