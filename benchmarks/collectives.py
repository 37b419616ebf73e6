"""The time of a sum over the ranks with residual and norm, by hidden size and rows: `collectives.py [--ranks 2]`.

Each is launched --launches times in one CUDA graph, as a model's layers do, and replayed; microseconds of one launch, of the
slowest rank, the best of --repeat replays. With "norm": the exchange, then our norm's kernel; "ours", one-shot and two-shot, is
both in one kernel. Before ours are timed, they are compared with a reference, and their bits between ranks. NVLink multicast is
off, as when serving.
Bias: all ranks begin together, and the graph holds nothing else; in a model each waits for the slowest rank's product before.
Prints a table and a last line `RESULT {json}`; `--csv FILE` appends rows. The ranks are processes of this script.
"""

import argparse
import csv
import datetime
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem

from quire.kernels.elementwise.norm import add_rms_norm
from quire.kernels.exchange.all_reduce_norm import reference
from quire.workers.group.cuda import NcclExchange, PeerNormExchange, all_agree, new_buffers, reaches_all
from quire.workers.group.place import Place

HIDDEN = (2048, 4096, 5120, 8192)
ROWS = (1, 4, 16, 64, 128, 256)
EPS = 1e-5
Run = Callable[[], object]


def ours_of(place: Place, hidden: int, max_rows: int) -> dict[str, PeerNormExchange]:
    """Our exchanges by name, for any number of rows, whatever the tuning table prefers."""
    made = {}
    for two_shot in (False, True):
        buffers, handle = new_buffers(place, max_rows, hidden, torch.bfloat16, None, two_shot=two_shot)
        made[f"ours {'two' if two_shot else 'one'}-shot"] = PeerNormExchange([buffers], [handle])
    all_agree(True, place.device)
    return made


def ways(rows: int, hidden: int, ours: dict[str, PeerNormExchange], nccl: NcclExchange, rank: int) -> dict[str, Run]:
    """The calls to be timed, by name; they reuse the same tensors."""
    device = torch.device("cuda", rank)
    generator = torch.Generator(device).manual_seed(rank)
    x = torch.randn(rows, hidden, device=device, dtype=torch.bfloat16, generator=generator)
    generator.manual_seed(0)
    residual = torch.randn(rows, hidden, device=device, dtype=torch.bfloat16, generator=generator)
    weight = torch.ones(hidden, device=device, dtype=torch.bfloat16)
    shared = symm_mem.empty(rows, hidden, device=device, dtype=torch.bfloat16)
    shared.fill_(0.01)
    symm_mem.rendezvous(shared, dist.group.WORLD)
    group = dist.group.WORLD.group_name
    one_shot, two_shot = torch.ops.symm_mem.one_shot_all_reduce, torch.ops.symm_mem.two_shot_all_reduce_
    zeros = torch.zeros_like(x)

    def norm(y: torch.Tensor) -> torch.Tensor:
        return add_rms_norm(y, residual, weight, EPS)

    for exchange in ours.values():
        check(x, residual.clone(), weight, exchange)
    return {
        "NCCL": lambda: nccl.all_reduce(zeros),
        "torch one-shot": lambda: one_shot(shared, "sum", group),
        "torch two-shot": lambda: two_shot(shared, "sum", group),
        "norm alone": lambda: norm(zeros),
        "NCCL, norm": lambda: norm(nccl.all_reduce(zeros)),
        "one-shot, norm": lambda: norm(one_shot(shared, "sum", group)),
        "two-shot, norm": lambda: norm(two_shot(shared, "sum", group)),
        **{name: partial(exchange.add_rms_norm, x, residual, weight, EPS) for name, exchange in ours.items()},
    }


def check(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, ours: PeerNormExchange) -> None:
    """Check that ours equals the reference, and has the same bits on all ranks."""
    xs = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(xs, x)
    want_residual, want = reference(xs, residual, weight, EPS)
    got = ours.add_rms_norm(x, residual, weight, EPS)
    torch.testing.assert_close(residual, want_residual, atol=3e-2, rtol=3e-2)
    torch.testing.assert_close(got, want, atol=3e-2, rtol=3e-2)
    everyone = [torch.empty_like(got) for _ in xs]
    dist.all_gather(everyone, got)
    assert all(torch.equal(other, got) for other in everyone), "ranks have other bits"


def microseconds(run: Run, launches: int, repeat: int) -> float:
    """Microseconds of one launch, on the slowest rank."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(launches):
            run()
    best = float("inf")
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    for _ in range(repeat + 2):
        dist.barrier()
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        taken = torch.tensor([begin.elapsed_time(end) * 1e3 / launches], device="cuda")
        dist.all_reduce(taken, op=dist.ReduceOp.MAX)
        best = min(best, float(taken))
    return best


def run_rank(args: argparse.Namespace) -> None:
    place = Place(args.rank, args.ranks, torch.device("cuda", args.rank), 10.0)
    torch.cuda.set_device(place.device)
    nccl = NcclExchange(dist.FileStore(args.store, args.ranks), place)
    rows: list[dict[str, object]] = []
    if not all_agree(reaches_all(place), place.device):
        sys.exit("these GPUs cannot reach each other's memory")
    for hidden in args.hidden:
        ours = ours_of(place, hidden, -(-max(args.rows) // place.size) * place.size)
        for n in args.rows:
            times = {
                name: microseconds(r, args.launches, args.repeat) for name, r in ways(n, hidden, ours, nccl, args.rank).items()
            }
            rows.append({"hidden": hidden, "rows": n, **{name: round(t, 2) for name, t in times.items()}})
            if args.rank == 0:
                print(f"{hidden:5} x {n:4}  " + "  ".join(f"{name} {t:.2f}" for name, t in times.items()), flush=True)
    if args.rank == 0:
        report(args, rows)
    nccl.close()


def report(args: argparse.Namespace, rows: list[dict[str, object]]) -> None:
    device = torch.cuda.get_device_name()
    if args.csv:
        with args.csv.open("a", newline="") as file:
            writer = csv.writer(file)
            for row in rows:
                for name, value in row.items():
                    if name not in ("hidden", "rows"):
                        writer.writerow([datetime.date.today(), device, args.ranks, row["hidden"], row["rows"], name, value])
    print("RESULT", json.dumps({"device": device, "ranks": args.ranks, "torch": torch.__version__, "rows": rows}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Sums over ranks with residual and norm, in microseconds.")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--hidden", type=int, nargs="+", default=HIDDEN)
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    parser.add_argument("--launches", type=int, default=32)
    parser.add_argument("--repeat", type=int, default=8)
    parser.add_argument("--csv", type=Path)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--store", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank is not None:
        return run_rank(args)
    with tempfile.TemporaryDirectory() as folder:
        again = [sys.executable, __file__, *sys.argv[1:], "--store", str(Path(folder) / "store")]
        ranks = [subprocess.Popen([*again, "--rank", str(rank)]) for rank in range(args.ranks)]
        failed = wait_for(ranks)
    return sys.exit(f"ranks that failed: {failed}" if failed else 0)


def wait_for(ranks: list[subprocess.Popen[bytes]]) -> list[int]:
    """The ranks that failed. A failure stops the others too, which would otherwise wait for it forever."""
    with ThreadPoolExecutor(len(ranks)) as pool:
        for ended in as_completed([pool.submit(process.wait) for process in ranks]):
            if ended.result():
                for process in ranks:
                    process.kill()
    return [rank for rank, process in enumerate(ranks) if process.returncode]


if __name__ == "__main__":
    main()
