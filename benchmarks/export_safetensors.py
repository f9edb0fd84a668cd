"""Write a Llama-architecture model Octavo can read (a GGUF file, say) as a bfloat16 safetensors folder.

    python benchmarks/export_safetensors.py smollm2 FOLDER

For peers that do not read GGUF files: same weights after exact dequantisation, rounded to bfloat16.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from octavo.model.config import ModelConfig
from octavo.model.load import load_model


def hf_config(config: ModelConfig) -> dict[str, object]:
    """config.json of LlamaForCausalLM."""
    if config.architecture != "llama" or config.rope.scaling is not None:
        raise SystemExit(
            f"only plain llama models are written, not {config.architecture} (scaling {config.rope.scaling})"
        )
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "torch_dtype": "bfloat16",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.context_tokens,
        "rms_norm_eps": config.rms_eps,
        "rope_theta": config.rope.theta,
        "tie_word_embeddings": config.tie_embeddings,
        "hidden_act": "silu",
        "bos_token_id": config.bos_token_id,
        "eos_token_id": list(config.eos_token_ids),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("folder", type=Path)
    args = parser.parse_args()
    loaded = load_model(args.model)
    config = hf_config(loaded.config)
    args.folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: loaded.tensors.tensor(name).to(torch.bfloat16).contiguous() for name in loaded.tensors.names()}
    save_file(tensors, args.folder / "model.safetensors", metadata={"format": "pt"})
    args.folder.joinpath("config.json").write_text(json.dumps(config, indent=1))
    loaded.tokenizer.backend.save(str(args.folder / "tokenizer.json"))
    end = loaded.tokenizer.id_to_token(min(loaded.config.eos_token_ids))
    args.folder.joinpath("tokenizer_config.json").write_text(
        json.dumps(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "eos_token": end,
                "chat_template": loaded.chat_template,
                "model_max_length": loaded.config.context_tokens,
            },
            indent=1,
        )
    )
    print(f"wrote {args.folder}: {len(tensors)} tensors in bfloat16")


if __name__ == "__main__":
    main()
