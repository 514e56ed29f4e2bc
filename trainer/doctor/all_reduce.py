"""Check of the sums over all ranks: their bits in three runs, and their bandwidth.

    python -m trainer.doctor.all_reduce

is one rank of the measurement. `measure` starts the ranks as `trainer train` does: on one node, with a private folder as store.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from trainer.distributed.network import STORE_VARIABLE
from trainer.doctor.check import Check, Severity, check

_RUNS = 3
_SEED = 1337
_GPU_VALUES, _CPU_VALUES = 64 << 20, 4 << 20  # fp32 values of one sum: 256 MiB on GPUs, 16 MiB on the CPU
_REPEATS = 5
_TIMEOUT_S = 120.0
_SLOW_GPU_BYTES_PER_S = 5e9


@dataclass(frozen=True)
class Sums:
    backend: str  # `nccl` or `gloo`
    num_ranks: int
    digests: tuple[str, ...] = ()  # digest of the same sum in each run and on each rank
    bytes_per_s: float = 0.0
    """Bandwidth of the links: bytes of the sum over its time, times 2 (n - 1) / n for n ranks (nccl-tests, "bus bandwidth")."""
    error: str = ""  # why there is no result


def measure(num_gpus: int, timeout_s: float = _TIMEOUT_S) -> Sums:
    num_ranks, device = (num_gpus, "cuda") if num_gpus else (2, "cpu")
    backend = "nccl" if num_gpus else "gloo"
    foreign = ("PET_", "TORCHELASTIC_", "MASTER_")
    variables = {name: value for name, value in os.environ.items() if not name.startswith(foreign)} | {"OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory(prefix="trainer-doctor.") as folder, ExitStack() as stack:

        def output(kind: str, number: int) -> list[str]:
            return (Path(folder) / f"{kind}-{number}").read_text(encoding="utf-8", errors="replace").strip().splitlines()

        started = []
        for number in range(num_ranks):
            own = {"RANK": number, "LOCAL_RANK": number, "WORLD_SIZE": num_ranks, "LOCAL_WORLD_SIZE": num_ranks}
            own_variables = {**variables, **{name: str(value) for name, value in own.items()}, STORE_VARIABLE: folder}
            command = [sys.executable, "-m", "trainer.doctor.all_reduce", device]
            # A rank writes into files and not into pipes, so that it never waits.
            with Path(folder, f"out-{number}").open("wb") as out, Path(folder, f"err-{number}").open("wb") as err:
                process = subprocess.Popen(command, env=own_variables, stdin=subprocess.DEVNULL, stdout=out, stderr=err)
            stack.callback(process.wait)
            stack.callback(process.kill)
            started.append(process)
        deadline = time.monotonic() + timeout_s
        for number, process in enumerate(started):
            try:
                code = process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                return Sums(backend, num_ranks, error=f"the ranks did not finish within {timeout_s:g} s")
            if code:
                return Sums(backend, num_ranks, error=(output("err", number) or [f"exit code {code}"])[-1])
        results = [json.loads(output("out", number)[-1]) for number in range(num_ranks)]
    digests = tuple(digest for result in results for digest in result["digests"])
    return Sums(backend, num_ranks, digests, min(result["bytes_per_s"] for result in results))


def rank(device: str) -> str:
    import torch  # noqa: PLC0415 - `measure` must not load it

    from trainer.distributed.group import joined_group  # noqa: PLC0415

    torch.set_num_threads(1)
    with joined_group(device) as group:
        generator = torch.Generator().manual_seed(_SEED + group.rank)
        values = torch.randn(_GPU_VALUES if device == "cuda" else _CPU_VALUES, generator=generator).to(group.device)
        digests = [hashlib.sha256(group.sum(values.clone()).cpu().numpy().tobytes()).hexdigest() for _ in range(_RUNS)]
        times = []
        for _ in range(_REPEATS):
            begin = time.monotonic()
            total = group.sum(values.clone())
            float(total[0])  # waits for the device
            times.append(time.monotonic() - begin)
        size = values.numel() * values.element_size()
        bandwidth = size / min(times) * 2 * (group.world_size - 1) / group.world_size
    return json.dumps({"digests": digests, "bytes_per_s": bandwidth})


@check("all-reduce", "machine", is_slow=True)
def check_all_reduce(num_gpus: int, refusal: str) -> list[Check]:
    return [] if refusal or num_gpus == 1 else [check_sums(measure(num_gpus))]


def check_sums(sums: Sums) -> Check:
    needed = f"the same bits in {_RUNS} runs and on all ranks"
    ranks = f"{sums.backend} on {sums.num_ranks} ranks"
    if sums.error:
        remedy = (
            "set NCCL_DEBUG=INFO and run the doctor again"
            if sums.backend == "nccl"
            else "check that the interface lo is up, and run the doctor again"
        )
        return Check("all-reduce", f"{ranks}: {sums.error}", Severity.ERROR, needed, remedy)
    rate = f"{sums.bytes_per_s / 1e9:.1f} GB/s"
    if (different := len(set(sums.digests))) != 1:
        remedy = (
            "set NCCL_ALGO=Ring and NCCL_PROTO=Simple in train.env; if the sums still differ, test the GPUs with `dcgmi diag -r 3`"
        )
        return Check("all-reduce", f"{ranks}: {different} different sums, {rate}", Severity.ERROR, needed, remedy)
    if sums.backend == "nccl" and sums.bytes_per_s < _SLOW_GPU_BYTES_PER_S:
        remedy = "see the row GPU links; NCCL_DEBUG=INFO shows the chosen transport (P2P, SHM, NET)"
        return Check("all-reduce", f"{ranks}: same bits, {rate}", Severity.WARNING, "5 GB/s or more between GPUs", remedy)
    return Check("all-reduce", f"{ranks}: same bits in {_RUNS} runs, {rate}", Severity.OK, needed)


if __name__ == "__main__":
    sys.stdout.write(f"{rank(sys.argv[1])}\n")
