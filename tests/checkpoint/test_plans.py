"""Plans: the pieces of all ranks make up the state, each byte once, at any world size and sharding.

Plain tensors need no processes for that. For sharded ones ranks are forked, with gloo, from one process that has
imported torch for all of them.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch

from holdfast.checkpoint import plans, sharded
from holdfast.checkpoint.copying import Copier
from holdfast.checkpoint.errors import CheckpointError
from holdfast.checkpoint.format import ITEM_BYTES, Piece
from holdfast.checkpoint.plans import ALIGNMENT, SMALL_BYTES, Plan, Position

Pieces = list[tuple[Piece, bytes]]


def positions(world_size: int, local_size: int) -> list[Position]:
    """Of all ranks. The last node may have fewer."""
    nodes = -(-world_size // local_size)
    found = []
    for rank in range(world_size):
        node = rank // local_size
        here = min(local_size, world_size - node * local_size)
        found.append(Position(rank, world_size, rank % local_size, here, node, nodes))
    return found


def random_tensors(chance: random.Random, count: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(chance.randrange(1 << 30))
    tensors = {}
    for at in range(count):
        shape = [chance.choice([0, 1, 1, 2, 3, 5, 7, 17, 40]) for _ in range(chance.randrange(4))]
        dtype = getattr(torch, chance.choice(list(ITEM_BYTES)))
        raw = torch.randint(0, 2, [*shape, dtype.itemsize], dtype=torch.uint8, generator=generator)
        tensors[f"t{at}"] = raw.view(dtype).reshape(shape)
    return tensors


def filled(plan: Plan) -> Pieces:
    """What a rank's slot would hold, through the copier."""
    copier = Copier()
    data = memoryview(bytearray(plan.data_bytes))
    failures: list[Exception | None] = []
    copier.start(plan, data, failures.append)
    copier.close()
    assert failures == [None]
    return [(piece, bytes(data[piece.at : piece.at + piece.size_bytes])) for piece in plan.pieces]


def check_layout(plan: Plan, volatile: set[str]) -> None:
    end = 0
    for at, piece in enumerate(plan.pieces):
        assert piece.at >= end and piece.at % ALIGNMENT == 0
        end = piece.at + piece.size_bytes
        if at + 1 == plan.written:
            assert plan.written_bytes == end
        assert tuple(plan.sources[at].shape) == piece.sizes or not piece.size_bytes
    assert plan.data_bytes == end
    if plan.written == 0:
        assert plan.written_bytes == 0
    assert set(plan.volatile) == {at for at, piece in enumerate(plan.pieces) if piece.key in volatile}


def check_whole(pieces: Pieces, wanted: Mapping[str, torch.Tensor], what: str) -> None:
    """Each element of each tensor exactly once, with its bytes."""
    found: dict[str, Pieces] = {}
    for piece, content in pieces:
        found.setdefault(piece.key, []).append((piece, content))
    assert found.keys() == wanted.keys(), what
    for key, tensor in wanted.items():
        whole = torch.zeros((*tensor.shape, tensor.element_size()), dtype=torch.uint8)
        times = torch.zeros(tensor.shape, dtype=torch.int)
        for piece, content in found[key]:
            assert piece.shape == tuple(tensor.shape) and piece.dtype == str(tensor.dtype).removeprefix("torch.")
            box = tuple(slice(at, at + size) for at, size in zip(piece.offsets, piece.sizes, strict=True))
            times[box] += 1
            if content:
                whole[box] = torch.frombuffer(bytearray(content), dtype=torch.uint8).view(*piece.sizes, -1)
        assert (times == 1).all(), f"{what}: {key} {[piece for piece, _ in found[key]]}"
        assert tensor.numel() or len(found[key]) == 1, f"{what}: {key}"
        raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        assert torch.equal(whole.reshape(-1), raw), f"{what}: {key} has other bytes"


def check_world(
    shares: list[tuple[Position, int, Pieces]], wanted: Mapping[str, torch.Tensor], shared: bool, what: str
) -> None:
    """`shares`: of each rank its position, how many pieces it writes, and all."""
    nodes = {position.node for position, _, _ in shares}
    written = {
        node: [piece for position, count, pieces in shares for piece in pieces[:count] if position.node == node]
        for node in nodes
    }
    if shared:
        check_whole([piece for node in nodes for piece in written[node]], wanted, f"{what}, written")
        return
    for node in nodes:
        kept = [piece for position, _, pieces in shares for piece in pieces if position.node == node]
        assert [piece[0] for piece in written[node]] == [piece[0] for piece in kept], what


# -- plain tensors -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize(("world_size", "local_size"), [(1, 1), (2, 2), (2, 1), (3, 2), (4, 2), (6, 3), (7, 3), (8, 8)])
def test_replicated_tensors_are_kept_once_a_node_and_written_once(
    world_size: int, local_size: int, shared: bool
) -> None:
    for seed in range(12):
        chance = random.Random(f"{seed} {world_size} {local_size}")
        tensors = random_tensors(chance, chance.randrange(25))
        volatile = {key for key in tensors if chance.random() < 0.2}
        shares = []
        for position in positions(world_size, local_size):
            plan = plans.Planner(position, shared).plan(tensors, volatile)
            check_layout(plan, volatile)
            shares.append((position, plan.written, filled(plan)))
        check_world(shares, tensors, shared, f"seed {seed}")
        for node in {position.node for position, _, _ in shares}:
            kept = [piece for position, _, pieces in shares for piece in pieces if position.node == node]
            check_whole(kept, tensors, f"seed {seed}, kept on node {node}")


def test_the_work_is_shared_out_by_bytes() -> None:
    chance = random.Random(5)
    tensors = {f"t{at}": torch.empty(chance.randrange(1, 100) * 1000, dtype=torch.uint8) for at in range(200)}
    total = sum(len(tensor) for tensor in tensors.values())
    found = [plans.Planner(position, True).plan(tensors, set()) for position in positions(8, 4)]
    for plan in found:
        assert abs(sum(piece.size_bytes for piece in plan.pieces) - total / 4) < total / 40
        assert abs(plan.written_bytes - total / 8) < total / 40


def test_small_and_volatile_ones_are_the_first_ranks() -> None:
    tensors = {"step": torch.zeros(()), "small": torch.zeros(SMALL_BYTES // 4), "buffer": torch.zeros(10_000)}
    for position in positions(4, 2):
        plan = plans.Planner(position, True).plan(tensors, {"buffer"})
        assert [piece.key for piece in plan.pieces] == (list(tensors) if position.local_rank == 0 else [])
        assert plan.written == (3 if position.rank == 0 else 0)


def test_a_plan_is_made_once_for_a_state_of_one_shape() -> None:
    position = positions(1, 1)[0]

    def state(**rest: Any) -> dict[str, torch.Tensor]:
        return {"a": torch.randn(3, 4), "b": torch.nn.Parameter(torch.randn(5))} | rest

    one, other = state(), state()
    planner = plans.Planner(position, True)
    first, second = planner.plan(one, set()), planner.plan(other, set())
    assert first.layout is second.layout
    assert first.sources[0] is one["a"] and second.sources[0] is other["a"]
    different = [
        planner.plan(state(a=torch.randn(3, 5)), set()),
        planner.plan(state(a=torch.randn(3, 4).double()), set()),
        planner.plan(state(c=torch.zeros(1)), set()),
        planner.plan(one, {"a"}),
        plans.Planner(positions(2, 1)[0], True).plan(one, set()),
    ]
    assert len({id(plan.layout) for plan in [first, *different]}) == 6
    assert len({plan.digest for plan in different[:3]} | {first.digest}) == 4
    assert different[4].digest == first.digest
    for at in range(50):
        planner.plan(state(c=torch.zeros(at)), set())
    assert len(planner._known) <= plans._MOST_LAYOUTS


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: torch.eye(3).to_sparse(), "x: a tensor of layout torch.sparse_coo cannot be saved"),
        (lambda: torch.empty(3, device="meta"), "x is on the meta device"),
        (lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8), "x: a tensor of torch.qint8"),
        (
            lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
            "x is a nested tensor, which cannot be saved",
        ),
    ],
)
def test_what_cannot_be_saved_is_named(make: Callable[[], torch.Tensor], says: str) -> None:
    with pytest.raises(CheckpointError) as raised:
        plans.Planner(positions(1, 1)[0], True).plan({"x": make()}, set())
    assert says in str(raised.value) and "\n" not in str(raised.value)


# -- sharded ones: all that follows runs in ranks ----------------------------------------------------------------------


def check_sharded(
    tensors: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor], what: str, volatile: set[str]
) -> None:
    """The same plan, for every way in which the ranks could be on nodes."""
    import torch.distributed as dist

    rank, size = dist.get_rank(), dist.get_world_size()
    for local_size in {1, 2, size}:
        for shared in (True, False):
            position = positions(size, local_size)[rank]
            planner = plans.Planner(position, shared)
            plan = planner.plan(tensors, volatile)
            assert planner.plan(tensors, volatile).layout is plan.layout
            check_layout(plan, volatile)
            shares: list[Any] = [None] * size
            dist.all_gather_object(shares, (position, plan.written, filled(plan), plan.digest))
            assert len({digest for *_, digest in shares}) == 1
            label = f"{what}, {local_size} a node, {'shared' if shared else 'not shared'}"
            if rank == 0:
                check_world([share[:3] for share in shares], wanted, shared, label)
            check_kept(tensors, shares, position, label)


def check_kept(tensors: dict[str, torch.Tensor], shares: list[Any], position: Position, what: str) -> None:
    """What this rank has of a sharded tensor is in the memory of its node, exactly once."""
    kept = [piece for other, _, pieces, _ in shares for piece, _ in pieces if other.node == position.node]
    for key, tensor in tensors.items():
        box = sharded.box_of(tensor) if sharded.is_sharded(tensor) else sharded.whole(tensor)
        if box is not None:
            same = [piece for piece in kept if piece.key == key and (piece.offsets, piece.sizes) == tuple(box)]
            assert len(same) == 1, f"{what}: {key} {box}"


def random_placements(chance: random.Random, ndim: int, mesh_dims: int) -> list[Any]:
    from torch.distributed.tensor import Replicate, Shard

    return [Shard(chance.randrange(ndim)) if ndim and chance.random() < 0.7 else Replicate() for _ in range(mesh_dims)]


def any_sharding(meshes: list[Any]) -> None:
    """Random shapes, many with fewer rows than ranks, in random placements on several meshes."""
    from torch.distributed.tensor import distribute_tensor

    for seed in range(3):
        chance = random.Random(seed)
        wanted = {
            f"t{at}": torch.randn([chance.choice([0, 1, 2, 3, 5, 8, 13]) for _ in range(chance.randrange(4))],
                                  generator=torch.Generator().manual_seed(seed * 100 + at))
            for at in range(16)
        }  # fmt: skip
        tensors = {}
        for key, tensor in wanted.items():
            mesh = chance.choice([*meshes, None])
            if mesh is None:
                tensors[key] = tensor
            else:
                placements = random_placements(chance, tensor.ndim, mesh.ndim)
                tensors[key] = distribute_tensor(tensor, mesh, placements, src_data_rank=None)
        volatile = {key for key in tensors if chance.random() < 0.2}
        check_sharded(tensors, wanted, f"seed {seed}", volatile)


def small_model(rows: int) -> torch.nn.Module:
    torch.manual_seed(rows)
    return torch.nn.Sequential(torch.nn.Linear(4, rows), torch.nn.BatchNorm1d(rows), torch.nn.Linear(rows, 3))


def trained_state(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    from holdfast.checkpoint import tree

    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=False)
    for parameter in model.parameters():
        parameter.grad = parameter.detach() * 0.5  # torch itself has no forward for some uneven shardings
    optimizer.step()
    return tree.flatten(model.state_dict(), "model")[1] | tree.flatten(optimizer.state_dict(), "optimizer")[1]


def check_trained(model: torch.nn.Module, what: str) -> None:
    state = trained_state(model)
    whole: dict[str, torch.Tensor] = {}
    for key, tensor in state.items():
        full: Any = tensor
        whole[key] = full.full_tensor() if sharded.is_sharded(tensor) else tensor
    assert any(sharded.is_sharded(tensor) for tensor in state.values())
    check_sharded(state, whole, what, {key for key in state if "running" in key})


def fsdp(mesh: Any) -> None:
    from torch.distributed.fsdp import fully_shard

    for rows in (1, 5):
        model = small_model(rows)
        fully_shard(model[0], mesh=mesh)  # type: ignore[index]
        fully_shard(model, mesh=mesh)
        check_trained(model, f"fully_shard, {rows} rows, {mesh}")


def fsdp_and_tensor_parallel(mesh: Any) -> None:
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    for rows in (3, 5, 8):
        torch.manual_seed(rows)
        model = torch.nn.Sequential(torch.nn.Linear(4, rows), torch.nn.Linear(rows, 3))
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
        fully_shard(model, mesh=mesh["dp"])
        check_trained(model, f"FSDP over TP, {rows} rows")


def refused(mesh: Any) -> None:
    from torch.distributed.tensor import DTensor, Partial
    from torch.distributed.tensor.placement_types import _StridedShard

    position = positions(mesh.size(), 1)[mesh.get_rank()]

    def refuse(tensor: torch.Tensor, says: str) -> None:
        with pytest.raises(CheckpointError) as raised:
            plans.Planner(position, True).plan({"x": tensor}, set())
        assert says in str(raised.value) and "\n" not in str(raised.value), raised.value

    refuse(DTensor.from_local(torch.ones(2), mesh, [Partial()]), "x is a partial sum on each rank")
    strided = DTensor.from_local(torch.ones(2), mesh, [_StridedShard(0, split_factor=2)], run_check=False)
    if mesh.size() == 2:
        refuse(strided, "rows do not follow each other")


def fsdp1(rank: int) -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardedStateDictConfig, StateDictType

    model = FullyShardedDataParallel(torch.nn.Linear(8, 8), device_id=torch.device("cpu"))
    with pytest.raises(CheckpointError, match=r"FSDP1.*use fully_shard"):
        plans.check_module(model)
    with FullyShardedDataParallel.state_dict_type(
        model, StateDictType.SHARDED_STATE_DICT, ShardedStateDictConfig(offload_to_cpu=True)
    ):
        state = model.state_dict()
    with pytest.raises(CheckpointError, match=r"FSDP1.*use fully_shard"):
        plans.Planner(positions(2, 1)[rank], True).plan(state, set())
    with pytest.raises(CheckpointError, match=r"FSDP1.*use fully_shard"):
        plans.Planner(positions(2, 1)[rank], True).plan(dict(model.named_parameters()), set())
    plans.check_module(torch.nn.Linear(1, 1))


def be_rank(rank: int, size: int, rendezvous: str) -> None:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=size)
    line = init_device_mesh("cpu", (size,))
    meshes = [line]
    if size == 4:
        square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        meshes += [square, square["dp"], square["tp"]]
        fsdp(square)  # the first dimension replicates
        fsdp_and_tensor_parallel(square)
    any_sharding(meshes[:2])
    fsdp(line)
    refused(line)
    if size == 2:
        fsdp1(rank)
    dist.destroy_process_group()


def be_nursery(sizes: list[int]) -> None:
    """Forks the ranks of each world, and prints what went wrong in them."""
    import torch._dynamo  # what making an optimizer imports
    import torch.distributed.checkpoint.default_planner
    import torch.distributed.fsdp
    import torch.distributed.tensor.parallel  # noqa: F401

    print(json.dumps({size: list(run_world(size)) for size in sizes}))


def run_world(size: int) -> Iterator[str]:
    with tempfile.TemporaryDirectory() as folder:
        ranks = []
        for rank in range(size):
            pid = os.fork()
            if pid == 0:
                status = 1
                try:
                    be_rank(rank, size, f"{folder}/store")
                    status = 0
                except BaseException:
                    with open(f"{folder}/{rank}", "w") as file:
                        file.write(traceback.format_exc())
                finally:
                    os._exit(status)
            ranks.append(pid)
        for rank, pid in enumerate(ranks):
            if os.waitpid(pid, 0)[1]:
                with open(f"{folder}/{rank}") as file:
                    yield f"rank {rank}: {file.read()}"


@pytest.fixture(scope="module")
def worlds() -> dict[str, list[str]]:
    code = "import sys; sys.path.insert(0, sys.argv[1]); import test_plans; test_plans.be_nursery([2, 3, 4])"
    command = [sys.executable, "-W", "ignore", "-c", code, os.path.dirname(__file__)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=110)
    assert run.returncode == 0, run.stderr
    found: dict[str, list[str]] = json.loads(run.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("size", [2, 3, 4])
def test_sharded_states_are_made_up_of_the_ranks_pieces(size: int, worlds: dict[str, list[str]]) -> None:
    assert worlds[str(size)] == [], "\n".join(worlds[str(size)])
