"""How many parameters a model has, counted from its config.json.

Counts the matrices of decoders with gated MLPs (three matrices), as all models in presets.py are.
Norms and biases are left out, less than a tenth of a percent; so is the vision part of multimodal
models.
"""

from __future__ import annotations

from dataclasses import dataclass

from .model_config import LayerKind, ModelConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class Parameters:
    """embedding: the table of tokens, and the output head where it is not the same one.
    attention, dense, experts: all layers together; dense are the MLPs (shared experts and routers
    too) that every token passes, experts those it is routed to.
    active: of all but `embedding`, those that one token is multiplied with.
    """

    embedding: int
    attention: int
    dense: int
    experts: int
    active: int

    @property
    def total(self) -> int:
        return self.embedding + self.attention + self.dense + self.experts


def count_parameters(config: ModelConfig) -> Parameters:
    """ValueError names the field that is missing."""
    hidden = config.whole("hidden_size")
    tables = 1 if config.get("tie_word_embeddings", True) else 2
    attention = sum(
        _linear_attention(config) if kind is LayerKind.STATE else _attention(config)
        for kind in config.layer_kinds()
    )
    sparse = _sparse_layers(config)
    dense_layers = config.whole("num_hidden_layers") - sparse
    dense = dense_layers and dense_layers * 3 * hidden * config.whole("intermediate_size")
    one_expert = num_experts = chosen = 0
    if sparse:
        one_expert = 3 * hidden * config.whole("moe_intermediate_size", "intermediate_size")
        num_experts = _num_experts(config)
        chosen = config.whole("num_experts_per_tok")
        dense += sparse * (hidden * num_experts + _shared_experts(config, hidden, one_expert))
    return Parameters(
        embedding=tables * config.whole("vocab_size") * hidden,
        attention=attention,
        dense=dense,
        experts=sparse * num_experts * one_expert,
        active=attention + dense + sparse * chosen * one_expert,
    )


def _attention(config: ModelConfig) -> int:
    hidden, heads = config.whole("hidden_size"), config.whole("num_attention_heads")
    if config.get("kv_lora_rank"):
        return _latent_attention(config, hidden, heads)
    width = config.head_dim()
    kv_heads = config.whole("num_key_value_heads", default=heads)
    value_width = config.whole("v_head_dim", default=width)
    # Qwen's hybrid models gate the output of attention, with as many parameters as the queries.
    queries = 2 if config.get("linear_num_value_heads") else 1
    into = queries * heads * width + kv_heads * (width + value_width)
    return hidden * (into + heads * value_width)


def _latent_attention(config: ModelConfig, hidden: int, heads: int) -> int:
    """Multi-head latent attention (DeepSeek-V2): low-rank queries, keys and values."""
    rank, rope = config.whole("kv_lora_rank"), config.whole("qk_rope_head_dim")
    nope, value = config.whole("qk_nope_head_dim"), config.whole("v_head_dim")
    query_rank = config.get("q_lora_rank")
    queries = heads * (nope + rope)
    query = query_rank * (hidden + queries) if query_rank else hidden * queries
    return query + hidden * (rank + rope) + heads * (rank * (nope + value) + value * hidden)


def _linear_attention(config: ModelConfig) -> int:
    """Gated DeltaNet, as in Qwen3-Next: queries, keys, values, a gate, two scalars a head."""
    hidden, value_heads = config.whole("hidden_size"), config.whole("linear_num_value_heads")
    keys = config.whole("linear_num_key_heads") * config.whole("linear_key_head_dim")
    values = value_heads * config.whole("linear_value_head_dim")
    into = 2 * keys + 2 * values + 2 * value_heads
    convolution = (2 * keys + values) * config.whole("linear_conv_kernel_dim")
    return hidden * (into + values) + convolution


def _num_experts(config: ModelConfig) -> int:
    return config.whole("n_routed_experts", "num_experts", "num_local_experts", default=1)


def _shared_experts(config: ModelConfig, hidden: int, one_expert: int) -> int:
    if width := config.get("shared_expert_intermediate_size"):
        return int(3 * hidden * width)
    return int(config.get("n_shared_experts", 0) * one_expert)


def _sparse_layers(config: ModelConfig) -> int:
    """Layers whose MLP is a mixture of experts."""
    if _num_experts(config) == 1:
        return 0
    first = config.get("first_k_dense_replace", 0)
    step = config.whole("decoder_sparse_step", default=1)
    dense = config.get("mlp_only_layers", [])
    layers = range(first, config.whole("num_hidden_layers"))
    return sum((i + 1) % step == 0 and i not in dense for i in layers)
