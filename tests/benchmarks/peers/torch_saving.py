"""Saves weights and AdamW's state while training continues: python torch_saving.py SETTINGS.json save|async_save EVERY FOLDER

It prints how long each save kept the loop waiting, with the wait for an earlier save in the background, as a JSON list of seconds.
"""

import json
import sys
import time
from concurrent.futures import Future
from pathlib import Path

import numpy as np
import torch
from plain_training import Model
from torch import distributed
from torch.distributed import checkpoint
from training_peer import Settings, crop, read_settings, stream


def main(way: str, every: int, folder: Path) -> None:
    s: Settings = read_settings()
    folder.mkdir()
    tokens, model = stream(s), Model(s)
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-4, fused=True)
    if way == "async_save":
        distributed.init_process_group("gloo", init_method=f"file://{folder}.rendezvous", rank=0, world_size=1)
    running: Future | None = None
    stalls = []
    for step in range(1, s.steps + 1):
        rows = torch.from_numpy(np.stack([crop(tokens, s.length + 1) for _ in range(s.micro)]))
        model(rows[:, :-1], rows[:, 1:]).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % every:
            continue
        weights = {name: weight for name, weight in model.state_dict().items() if name != "head.weight"}  # shared
        state = {"model": weights, "optimizer": optimizer.state_dict()}
        begun = time.perf_counter()
        if way == "save":
            torch.save(state, folder / f"{step}.pt")
        else:
            if running is not None:
                running.result()
            running = checkpoint.async_save(state, checkpoint_id=folder / str(step))
        stalls.append(time.perf_counter() - begun)
    if running is not None:
        running.result()
        distributed.destroy_process_group()
    print(json.dumps(stalls))


if __name__ == "__main__":
    main(sys.argv[2], int(sys.argv[3]), Path(sys.argv[4]))
