"""Hugging Face's Trainer with Qwen3, which has the decoder of this project: python transformers_training.py SETTINGS.json"""

import json
import sys
import tempfile
import time
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset
from training_peer import Settings, crop, read_settings, stream
from transformers import Qwen3Config, Qwen3ForCausalLM, Trainer, TrainerCallback, TrainingArguments


class Crops(Dataset):
    """Random crops. The model itself shifts the targets by one."""

    def __init__(self, settings: Settings) -> None:
        self.settings, self.tokens = settings, stream(settings)

    def __len__(self) -> int:
        return self.settings.steps * self.settings.micro * self.settings.micro_batches

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        row = crop(self.tokens, self.settings.length)
        return {"input_ids": row, "labels": row}


class Clock(TrainerCallback):
    """The times at which steps end."""

    def __init__(self) -> None:
        self.times = [time.perf_counter()]

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self.times = [time.perf_counter()]

    def on_step_end(self, *_: Any, **__: Any) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.times.append(time.perf_counter())
        print(f"\nstep {len(self.times) - 1}", flush=True)


def main() -> None:
    s = read_settings()
    config = Qwen3Config(
        vocab_size=s.vocab,
        hidden_size=s.width,
        intermediate_size=s.mlp_width,
        num_hidden_layers=s.layers,
        num_attention_heads=s.heads,
        num_key_value_heads=s.heads,
        head_dim=s.width // s.heads,
        max_position_embeddings=s.length,
        tie_word_embeddings=True,
        use_cache=False,
    )
    clock = Clock()
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            max_steps=s.steps,
            per_device_train_batch_size=s.micro,
            gradient_accumulation_steps=s.micro_batches,
            learning_rate=6e-4,
            weight_decay=0.1,
            max_grad_norm=1.0,
            optim="adamw_torch_fused",
            use_cpu=s.device == "cpu",
            bf16=s.bf16,
            torch_compile=s.compiled,
            dataloader_num_workers=0 if s.device == "cpu" else 4,
            save_strategy="no",
            logging_strategy="no",
            report_to=[],
            disable_tqdm=True,
        )
        model = Qwen3ForCausalLM(config).to(torch.float32)
        Trainer(model=model, args=arguments, train_dataset=Crops(s), callbacks=[clock]).train()
    sys.stdout.write("\n" + json.dumps(np.diff(clock.times).tolist()) + "\n")


if __name__ == "__main__":
    main()
