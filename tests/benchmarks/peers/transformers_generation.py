"""transformers' generate with Qwen3 and a cache: python transformers_generation.py BATCH PROMPT_TOKENS NEW_TOKENS SHAPE

SHAPE is JSON: layers, width, heads, mlp_width, vocab, length. It prints tokens per second, CPU seconds and the number of tokens.
"""

import json
import sys
import time

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM


def main(batch: int, prompt_tokens: int, new_tokens: int, shape: dict[str, int]) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=shape["vocab"],
        hidden_size=shape["width"],
        intermediate_size=shape["mlp_width"],
        num_hidden_layers=shape["layers"],
        num_attention_heads=shape["heads"],
        num_key_value_heads=shape["heads"],
        head_dim=shape["width"] // shape["heads"],
        max_position_embeddings=shape["length"],
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    model = Qwen3ForCausalLM(config).to(torch.float32).eval()
    prompts = torch.randint(1, shape["vocab"], (batch, prompt_tokens))
    how = {"do_sample": True, "temperature": 0.8, "top_k": 0, "use_cache": True, "attention_mask": torch.ones_like(prompts)}
    model.generate(prompts, max_new_tokens=8, **how)
    begun, cpu = time.perf_counter(), time.process_time()
    texts = model.generate(prompts, max_new_tokens=new_tokens, **how)
    taken, cpu = time.perf_counter() - begun, time.process_time() - cpu
    tokens = (texts.shape[1] - prompt_tokens) * batch
    print(json.dumps({"value": tokens / taken, "cpu": cpu, "facts": {"tokens": tokens}}))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:4]), json.loads(sys.argv[4]))
