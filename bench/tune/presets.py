"""Common open models by name: the fields of their published config.json that sizes depend on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def _dense(
    hidden: int, inner: int, layers: int, heads: int, kv_heads: int, vocab: int, **more: Any
) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocab,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        **more,
    }


def _qwen3_moe(hidden: int, expert: int, layers: int, heads: int) -> dict[str, Any]:
    experts = {"moe_intermediate_size": expert, "num_experts": 128, "num_experts_per_tok": 8}
    return _dense(
        hidden,
        3 * hidden,
        layers,
        heads,
        4,
        151936,
        model_type="qwen3_moe",
        head_dim=128,
        **experts,
    )


def _latent(heads: int, dense_layers: int, experts: int, vocab: int) -> dict[str, Any]:
    """DeepSeek-V3 and what is built like it, with weights in fp8."""
    return _dense(
        7168,
        18432,
        61,
        heads,
        heads,
        vocab,
        model_type="deepseek_v3",
        kv_lora_rank=512,
        q_lora_rank=1536,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        moe_intermediate_size=2048,
        n_routed_experts=experts,
        n_shared_experts=1,
        num_experts_per_tok=8,
        first_k_dense_replace=dense_layers,
        quantization_config={"quant_method": "fp8"},
    )


def _gpt_oss(layers: int, experts: int) -> dict[str, Any]:
    return _dense(
        2880,
        2880,
        layers,
        64,
        8,
        201088,
        model_type="gpt_oss",
        head_dim=64,
        sliding_window=128,
        layer_types=["sliding_attention", "full_attention"] * (layers // 2),
        num_local_experts=experts,
        num_experts_per_tok=4,
        quantization_config={"quant_method": "mxfp4"},
    )


_LLAMA_70B = _dense(8192, 28672, 80, 64, 8, 128256)
_DEEPSEEK_V3 = _latent(128, 3, 256, 129280)

PRESETS: Mapping[str, Mapping[str, Any]] = {
    "llama-3.1-8b": _dense(4096, 14336, 32, 32, 8, 128256),
    "llama-3.1-70b": _LLAMA_70B,
    "llama-3.1-405b": _dense(16384, 53248, 126, 128, 8, 128256),
    "llama-3.3-70b": _LLAMA_70B,
    "qwen2.5-7b": _dense(3584, 18944, 28, 28, 4, 152064),
    "qwen2.5-72b": _dense(8192, 29568, 80, 64, 8, 152064),
    "qwen3-8b": _dense(4096, 12288, 36, 32, 8, 151936, head_dim=128),
    "qwen3-32b": _dense(5120, 25600, 64, 64, 8, 151936, head_dim=128),
    "qwen3-30b-a3b": _qwen3_moe(2048, 768, 48, 32),
    "qwen3-235b-a22b": _qwen3_moe(4096, 1536, 94, 64),
    "qwen3-next-80b-a3b": _dense(
        2048,
        5120,
        48,
        16,
        2,
        151936,
        model_type="qwen3_next",
        head_dim=256,
        full_attention_interval=4,
        linear_conv_kernel_dim=4,
        linear_key_head_dim=128,
        linear_num_key_heads=16,
        linear_num_value_heads=32,
        linear_value_head_dim=128,
        moe_intermediate_size=512,
        num_experts=512,
        num_experts_per_tok=10,
        shared_expert_intermediate_size=512,
    ),
    "mistral-7b-v0.3": _dense(4096, 14336, 32, 32, 8, 32768),
    "mixtral-8x7b": _dense(
        4096, 14336, 32, 32, 8, 32000, num_local_experts=8, num_experts_per_tok=2
    ),
    "gemma-3-27b": _dense(
        5376,
        21504,
        62,
        32,
        16,
        262208,
        model_type="gemma3_text",
        head_dim=128,
        sliding_window=1024,
        sliding_window_pattern=6,
        tie_word_embeddings=True,
    ),
    "deepseek-v3": _DEEPSEEK_V3,
    "deepseek-r1": _DEEPSEEK_V3,
    "kimi-k2": _latent(64, 1, 384, 163840),
    "glm-4.5": _dense(
        5120,
        12288,
        92,
        96,
        8,
        151552,
        head_dim=128,
        moe_intermediate_size=1536,
        n_routed_experts=160,
        n_shared_experts=1,
        num_experts_per_tok=8,
        first_k_dense_replace=3,
    ),
    "gpt-oss-20b": _gpt_oss(24, 32),
    "gpt-oss-120b": _gpt_oss(36, 128),
}
"""By the name that --model takes."""
