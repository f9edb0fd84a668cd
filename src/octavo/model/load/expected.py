"""Which tensors a configuration needs, and in which shapes: checked before anything is allocated."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from ...errors import ModelError
from ..config import ModelConfig

MAX_LAYERS = 1024  # a checkpoint that claims more is damaged; nothing is built from such a number

# Buffers that older exporters saved and no network reads.
IGNORED_SUFFIXES = ("rotary_emb.inv_freq", ".masked_bias", ".attn.bias")

# A weight under one of these names belongs to a kind of checkpoint that is not supported.
FOREIGN_MARKS = (
    ("lora_", "a LoRA adapter"),
    ("experts.", "a mixture of experts (MoE)"),
    (".block_sparse_moe.", "a mixture of experts (MoE)"),
    ("_exps.", "a mixture of experts (MoE)"),
    ("qweight", "GPTQ or AWQ quantised weights"),
    ("qzeros", "GPTQ or AWQ quantised weights"),
    ("weight_scale", "FP8 or compressed-tensors quantised weights"),
    ("vision_tower.", "a vision model"),
    ("vision_model.", "a vision model"),
    ("multi_modal_projector", "a vision model"),
    ("visual.", "a vision model"),
)


def expected_tensors(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Canonical name → shape of every weight that a network of this configuration reads."""
    c = config
    query, key_value = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (c.vocab_size, c.hidden_size),
        "model.norm.weight": (c.hidden_size,),
    }
    if not c.tie_embeddings:
        shapes["lm_head.weight"] = (c.vocab_size, c.hidden_size)
    layer: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (c.hidden_size,),
        "post_attention_layernorm.weight": (c.hidden_size,),
        "self_attn.q_proj.weight": (query, c.hidden_size),
        "self_attn.k_proj.weight": (key_value, c.hidden_size),
        "self_attn.v_proj.weight": (key_value, c.hidden_size),
        "self_attn.o_proj.weight": (c.hidden_size, query),
        "mlp.gate_proj.weight": (c.intermediate_size, c.hidden_size),
        "mlp.up_proj.weight": (c.intermediate_size, c.hidden_size),
        "mlp.down_proj.weight": (c.hidden_size, c.intermediate_size),
    }
    if c.post_norms:
        layer["pre_feedforward_layernorm.weight"] = (c.hidden_size,)
        layer["post_feedforward_layernorm.weight"] = (c.hidden_size,)
    if c.qk_norm:
        layer["self_attn.q_norm.weight"] = (c.head_dim,)
        layer["self_attn.k_norm.weight"] = (c.head_dim,)
    if c.attention_bias:
        layer["self_attn.q_proj.bias"] = (query,)
        layer["self_attn.k_proj.bias"] = (key_value,)
        layer["self_attn.v_proj.bias"] = (key_value,)
    if c.attention_out_bias:
        layer["self_attn.o_proj.bias"] = (c.hidden_size,)
    if c.mlp_bias:
        layer["mlp.gate_proj.bias"] = (c.intermediate_size,)
        layer["mlp.up_proj.bias"] = (c.intermediate_size,)
        layer["mlp.down_proj.bias"] = (c.hidden_size,)
    for index in range(c.num_layers):
        shapes.update({f"model.layers.{index}.{name}": shape for name, shape in layer.items()})
    return shapes


def foreign_kind(names: Iterable[str]) -> tuple[str, str] | None:
    """(what was found, the tensor that shows it) if the names belong to an unsupported kind of checkpoint."""
    for name in names:
        for mark, what in FOREIGN_MARKS:
            if mark in name:
                return what, name
    return None


def check_tensors(
    config: ModelConfig,
    shapes: Mapping[str, tuple[int, ...]],
    files: Mapping[str, object],
    *,
    file: object,
    shown: Callable[[str], str] = str,
) -> None:
    """Raise `ModelError` for a missing tensor, a wrong shape, or a weight that no part of the network would read.

    `files` says which file holds a tensor, `file` is named where none does, `shown` gives the file's own names.
    """
    expected = expected_tensors(config)
    for name, shape in expected.items():
        label = shown(name)
        if name not in shapes:
            raise ModelError(
                f"tensor missing; a {config.architecture} checkpoint of "
                f"{config.num_layers} layers needs it in shape {list(shape)}",
                file=file,
                tensor=label,
            )
        if tuple(shapes[name]) != shape:
            raise ModelError(
                f"wrong shape {list(shapes[name])}; the configuration asks for {list(shape)}",
                file=files.get(name, file),
                tensor=label,
            )
    extra = [name for name in shapes if name not in expected and not name.endswith(IGNORED_SUFFIXES)]
    if config.tie_embeddings:  # a saved copy of the tied head says nothing new
        extra = [name for name in extra if name != "lm_head.weight"]
    if extra:
        name = extra[0]
        raise ModelError(
            f"unexpected tensor ({len(extra)} such): a {config.architecture} network of this "
            "configuration has no use for it, and leaving it out would change the answers",
            file=files.get(name, file),
            tensor=shown(name),
        )
