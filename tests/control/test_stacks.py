"""Dumps read, ranks grouped by where they are, and the one that the others wait for. Stacks are as real ones were."""

from __future__ import annotations

import random

import msgspec
import pytest

from holdfast.control import stacks
from holdfast.control.stacks import Frame, Group, Stack, parse

SITE = "/venv/lib/python3.11/site-packages"
STDLIB = "/usr/lib/python3.11"
OURS = [
    "/venv/lib/python3.11/site-packages/holdfast/worker/programs.py:52 _run_script",
    "/venv/lib/python3.11/site-packages/holdfast/worker/bootstrap.py:49 run",
    "/venv/lib/python3.11/site-packages/holdfast/agent/zygote.py:43 main",
    "/venv/lib/python3.11/site-packages/holdfast/agent/janitor.py:34 main",
    "<string>:4 <module>",
]
USER = ["/home/me/train.py:28 main", "/home/me/train.py:89 <module>"]

OF_3_11 = """Thread 0x00007fc104afd6c0 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 327 in wait
  File "/usr/lib/python3.11/threading.py", line 1002 in _bootstrap

Current thread 0x00007fc106866b80 (most recent call first):
  File "/home/me/a "dir"/data.py", line 41 in read
  File "/home/me/train.py", line 8 in <module>
  File "<string>", line 4 in <module>
"""
OF_3_14 = """Thread 0x00007fc104afd6c0 [pin [mem] 1] (most recent call first):
  File "/usr/lib/python3.14/threading.py", line 327 in wait

Thread 0x00007fc104afd6c1 (most recent call first):
  <no Python frame>

Current thread 0x00007fc106866b80 [python] (most recent call first):
  Garbage-collecting
  File "/home/me/data.py", line 41 in read
  File ???, line ??? in ???

Current thread's C stack trace (most recent call first):
  Binary file "/usr/bin/python", at _Py_DumpStack+0x32 [0x5e1f]
  <truncated rest of calls>
"""


def frames(*lines: str) -> tuple[Frame, ...]:
    """From "path:line function"."""
    found = []
    for line in lines:
        place, _, function = line.partition(" ")
        file, _, number = place.rpartition(":")
        found.append(
            Frame(
                file.replace("torch/", f"{SITE}/torch/") if file.startswith("torch/") else file, int(number), function
            )
        )
    return tuple(found)


def at(rank: int, *lines: str, state: str = "", note: str = "") -> Stack:
    return Stack(rank, frames(*lines), state, note=note)


C10D = "torch/distributed/distributed_c10d.py"
LOGGER = "torch/distributed/c10d_logger.py:83 wrapper"
ALL_REDUCE = (f"{C10D}:3252 all_reduce", LOGGER, *USER)
BARRIER = (f"{C10D}:5356 barrier", LOGGER, *USER)
READ = ("/home/me/data.py:41 read", *USER)
ITEM = ("/home/me/train.py:30 main", "/home/me/train.py:89 <module>")


# -- reading ----------------------------------------------------------------------------------------------------------


def test_a_dump_is_read_and_the_main_thread_is_the_last() -> None:
    other, main = parse(OF_3_11)
    assert (other.main, other.current, other.frames[-1].function) == (False, False, "_bootstrap")
    assert (main.main, main.current, main.ident) == (True, True, "00007fc106866b80")
    assert main.frames[0] == Frame('/home/me/a "dir"/data.py', 41, "read")
    assert [frame.function for frame in stacks.main_frames(parse(OF_3_11))] == ["read", "<module>"]


def test_a_dump_of_a_newer_python_is_read() -> None:
    first, empty, main = parse(OF_3_14)
    assert (first.name, first.main) == ("pin [mem] 1", False)
    assert empty.frames == ()
    assert (main.name, main.main) == ("python", True)
    assert main.frames == (Frame("/home/me/data.py", 41, "read"), Frame("???", 0, "???"))


def test_where_threads_are_left_out_the_main_one_is_the_one_that_took_the_signal() -> None:
    main, other = parse(
        'Current thread 0x1 (most recent call first):\n  File "a.py", line 1 in f\n\n'
        'Thread 0x2 (most recent call first):\n  File "b.py", line 1 in g\n  ...\n\n...\n'
    )
    assert (main.main, other.main) == (True, False)


def test_a_stack_that_was_too_deep_is_no_list_of_threads_that_was_too_long() -> None:
    first, last = parse(
        'Current thread 0x1 (most recent call first):\n  File "a.py", line 1 in f\n  ...\n\n'
        'Thread 0x2 (most recent call first):\n  File "b.py", line 1 in g\n  ...\n'
    )
    assert (first.main, last.main) == (False, True)


def test_our_own_frames_are_left_out_at_the_bottom_only() -> None:
    inner = ["<string>:1 <module>", *READ]
    lines = [f'  File "{frame.file}", line {frame.line} in {frame.function}' for frame in frames(*inner, *OURS)]
    text = "Current thread 0x1 (most recent call first):\n" + "\n".join(lines) + "\n"
    assert stacks.main_frames(parse(text)) == frames(*inner)


def test_a_backward_on_a_gpu_is_where_its_own_thread_is() -> None:
    engine = stacks.Thread("1", "", False, frames("/home/me/op.py:7 backward", "torch/autograd/function.py:311 apply"))
    python = stacks.Thread("2", "", False, frames(f"{STDLIB}/threading.py:1002 _bootstrap"))
    main = stacks.Thread("3", "", True, frames("torch/autograd/graph.py:979 _engine_run_backward", *USER))
    (one,) = stacks.group([Stack(0, stacks.main_frames([engine, python, main]))])
    assert (one.what, one.collective) == ("op.py:7 backward", False)
    (one,) = stacks.group([Stack(0, stacks.main_frames([python, main]))])
    assert (one.what, one.collective) == ("backward", True)


@pytest.mark.parametrize("seed", range(20))
def test_whatever_comes_there_is_a_value(seed: int) -> None:
    chance = random.Random(seed)
    for _ in range(50):
        if chance.random() < 0.3:
            text = chance.randbytes(chance.randrange(2000)).decode(errors="replace")
        else:
            lines = (OF_3_11 + OF_3_14).splitlines(keepends=True)
            chance.shuffle(lines)
            text = "".join(lines)
            for _ in range(chance.randrange(5)):
                cut, to = sorted(chance.choices(range(len(text) + 1), k=2))
                text = text[:cut] + chance.choice(["", "\n", "\0", "  File ", "9" * 30, "٣", "\udcff"]) + text[to:]
        threads = parse(text)
        assert sum(thread.main for thread in threads) == min(1, len(threads))
        found = stacks.main_frames(threads)
        groups = stacks.group([Stack(0, found), Stack(1, found, workers=(found, ())), Stack(2, state="stopped")])
        assert stacks.suspects(groups) == (2,)
        assert stacks.report(groups, (2,)).startswith(stacks.describe(groups))
        assert sum(one.count for one in groups) == 3


# -- where a rank is --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("inner", "what"),
    [
        ([f"{C10D}:3252 all_reduce", LOGGER], "all_reduce"),
        ([f"{C10D}:5435 monitored_barrier"], "monitored_barrier"),
        ([f"{C10D}:4287 all_gather", LOGGER, f"{C10D}:3513 all_gather_object", LOGGER], "all_gather_object"),
        (
            [f"{C10D}:2169 _new_process_group_helper", f"{C10D}:6056 _new_group_with_tag", f"{C10D}:58 new_group"],
            "new_group",
        ),
        (
            ["torch/distributed/rendezvous.py:199 _create_c10d_store", f"{C10D}:1892 init_process_group", LOGGER],
            "init_process_group",
        ),
        (
            [
                "torch/distributed/utils.py:286 _verify_param_shape_across_processes",
                "torch/nn/parallel/distributed.py:1064 __init__",
            ],
            "DistributedDataParallel",
        ),
        (
            [
                "torch/nn/parallel/distributed.py:1775 _pre_forward",
                "torch/nn/parallel/distributed.py:1886 forward",
                "torch/nn/modules/module.py:1789 _call_impl",
            ],
            "DistributedDataParallel forward",
        ),
        (["torch/autograd/graph.py:979 _engine_run_backward", "torch/autograd/__init__.py:395 backward"], "backward"),
        (
            [
                f"{C10D}:4394 all_gather_single",
                LOGGER,
                "torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py:119 __call__",
            ],
            "all_gather_single",
        ),
        (["torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py:407 wait_for_unshard"], "FSDP wait_for_unshard"),
        (
            [
                "torch/_ops.py:882 redispatch",
                "torch/_library/autograd.py:41 forward_no_grad",
                "torch/_ops.py:1279 __call__",
                "torch/distributed/_functional_collectives.py:142 wait_tensor",
            ],
            "wait_tensor",
        ),
    ],
)
def test_a_collective_is_named(inner: list[str], what: str) -> None:
    (one,) = stacks.group([at(0, *inner, *USER)])
    assert (one.what, one.collective) == (what, True)


@pytest.mark.parametrize(
    ("inner", "what"),
    [
        ([], "train.py:28 main"),
        (["/home/me/data.py:41 read"], "data.py:41 read"),
        ([f"{STDLIB}/socket.py:706 readinto"], "train.py:28 main"),
        (
            ["torch/nn/modules/linear.py:125 forward", "torch/nn/parallel/distributed.py:1700 _run_ddp_forward"],
            "train.py:28 main",
        ),
        (["torch/distributed/checkpoint/filesystem.py:300 _write_item"], "train.py:28 main"),
        (["/home/me/op.py:7 forward", "torch/autograd/function.py:6 apply", f"{C10D}:1 all_reduce"], "op.py:7 forward"),
        (["torch/cuda/__init__.py:985 synchronize"], "train.py:28 main"),
        (
            [
                "/home/me/data.py:41 __getitem__",
                "torch/utils/data/_utils/fetch.py:54 fetch",
                "torch/utils/data/dataloader.py:785 _next_data",
            ],
            "data.py:41 __getitem__",
        ),
        (
            [
                f"{STDLIB}/selectors.py:415 select",
                "torch/utils/data/dataloader.py:1291 _try_get_data",
                "torch/utils/data/dataloader.py:1464 _get_data",
            ],
            "data loader",
        ),
        (
            [
                f"{STDLIB}/threading.py:331 wait",
                f"{STDLIB}/queue.py:180 get",
                "torch/utils/data/dataloader.py:1291 _try_get_data",
            ],
            "data loader",
        ),
    ],
)
def test_all_else_is_no_collective(inner: list[str], what: str) -> None:
    (one,) = stacks.group([at(0, *inner, *USER)])
    assert (one.what, one.collective) == (what, False)


LOOP = ["torch/utils/data/_utils/fetch.py:54 fetch", "torch/utils/data/_utils/worker.py:374 _worker_loop", *USER]


@pytest.mark.parametrize(
    ("workers", "what"),
    [
        ([["/home/me/data.py:41 __getitem__", *LOOP]], "data.py:41 __getitem__ (data loader worker)"),
        ([[f"{SITE}/datasets/arrow.py:9 take", *LOOP]], "arrow.py:9 take (data loader worker)"),
        ([[f"{STDLIB}/queues.py:113 get", *LOOP[1:]]], "data loader"),
        (
            [
                [*LOOP[1:]],
                ["/home/me/data.py:41 f", *LOOP],
                ["/home/me/data.py:9 g", *LOOP],
                ["/home/me/data.py:9 g", *LOOP],
            ],
            "data.py:9 g (data loader worker)",
        ),
        ([["/home/me/other.py:3 helper", *USER]], "data loader"),
    ],
)
def test_what_the_workers_of_a_data_loader_do_is_named(workers: list[list[str]], what: str) -> None:
    waits = frames("torch/utils/data/dataloader.py:1291 _try_get_data", *USER)
    (one,) = stacks.group([Stack(0, waits, workers=tuple(frames(*worker) for worker in workers))])
    assert (one.what, one.collective) == (what, False)


# -- groups -----------------------------------------------------------------------------------------------------------


def test_ranks_at_one_place_are_a_group_and_the_largest_is_first() -> None:
    groups = stacks.group([at(2, *READ), at(0, *ALL_REDUCE), at(3, *ALL_REDUCE), at(1, *ALL_REDUCE)], node="n0")
    assert [(one.ranks, one.count, one.what) for one in groups] == [
        ((0, 1, 3), 3, "all_reduce"),
        ((2,), 1, "data.py:41 read"),
    ]
    assert groups[1].frames == ("data.py:41 read", "train.py:28 main", "train.py:89 <module>")
    assert stacks.describe(groups) == "3 ranks in all_reduce, rank 2 in data.py:41 read"
    assert stacks.suspects(groups) == (2,)


def test_one_collective_from_two_places_is_one_group() -> None:
    (one,) = stacks.group([at(0, *ALL_REDUCE), at(1, *ALL_REDUCE[:2], "/home/me/eval.py:3 f")])
    assert one.ranks == (0, 1)


def test_ranks_at_one_line_but_at_different_ones_of_a_library_are_told_apart() -> None:
    groups = stacks.group([at(r, f"{SITE}/tok/tok.py:{9 if r == 2 else 5} f", *USER) for r in range(4)])
    assert stacks.suspects(groups) == (2,)
    assert (
        stacks.describe(groups) == "3 ranks in train.py:28 main (tok.py:5 f), rank 2 in train.py:28 main (tok.py:9 f)"
    )


def test_groups_of_nodes_become_one_and_keep_their_count() -> None:
    first = stacks.group([at(r, *ALL_REDUCE) for r in range(100)], node="a")
    second = stacks.group([*(at(r, *ALL_REDUCE) for r in range(100, 199)), at(199, *READ)], node="b")
    merged = stacks.merge([*second, *first])
    assert [(one.count, one.node) for one in merged] == [(199, ""), (1, "b")]
    assert merged[0].ranks == tuple(range(64))
    assert stacks.suspects(merged) == (199,)
    assert stacks.merge(merged) == merged
    assert msgspec.json.decode(msgspec.json.encode(merged), type=tuple[Group, ...]) == merged


def test_the_same_place_in_other_folders_is_one_place() -> None:
    one = stacks.group([at(0, "/scratch/0/job/train.py:1 f")], node="a")
    two = stacks.group([at(1, "/scratch/1/job/train.py:1 f")], node="b")
    assert len(stacks.merge([*one, *two])) == 1


@pytest.mark.parametrize(
    ("found", "suspects"),
    [
        ([at(0, *ALL_REDUCE), at(1, *READ)], (1,)),
        ([at(0, *ALL_REDUCE), at(1, *READ), at(2, *ITEM)], (1, 2)),
        ([at(0, *ALL_REDUCE), at(1, *ALL_REDUCE)], ()),
        ([at(0, *ALL_REDUCE), at(1, *BARRIER), at(2, *BARRIER)], ()),
        ([at(0, *ITEM), at(1, *ITEM), at(2, *READ)], (2,)),
        ([at(0, *ITEM), at(1, *READ)], ()),
        ([at(0, *ITEM), at(1, *ITEM), at(2, *READ), at(3, *READ)], ()),
        ([at(0, *ITEM), at(1, *ITEM)], ()),
        ([at(0, *ITEM), at(1, *ITEM, state="stopped")], (1,)),
        ([at(0, *ALL_REDUCE), at(1, *READ), at(2, *ALL_REDUCE, state="stopped")], (2,)),
        ([at(0, *ALL_REDUCE), at(1, state="in the kernel")], (1,)),
        ([at(0, *ALL_REDUCE), at(1, note="no answer")], (1,)),
        ([at(0, *ALL_REDUCE), at(1, note="no answer"), at(2, *READ)], (2,)),
        ([at(0, note="started cold"), at(1, note="started cold")], ()),
        ([at(0, *ALL_REDUCE), at(1, note=stacks.ENDING), at(2, note="no answer")], (1,)),
        ([], ()),
    ],
)
def test_the_ranks_that_others_wait_for(found: list[Stack], suspects: tuple[int, ...]) -> None:
    assert stacks.suspects(stacks.group(found)) == suspects


def test_a_description_is_short() -> None:
    groups = stacks.group([at(r, f"/home/me/a.py:{r} f") for r in range(6)])
    assert stacks.describe(groups) == (
        "rank 0 in a.py:0 f, rank 1 in a.py:1 f, rank 2 in a.py:2 f, rank 3 in a.py:3 f, and 2 more"
    )
    assert stacks.describe(()) == "no rank has a stack"


@pytest.mark.parametrize(
    ("stack", "text"),
    [
        (at(2, *READ, state="stopped"), "rank 2 stopped by a signal"),
        (at(2, *READ, state="held by a debugger"), "rank 2 held by a debugger"),
        (at(2, *READ, state="in the kernel"), "rank 2 in the kernel at data.py:41 read"),
        (at(2, state="in the kernel"), "rank 2 in the kernel"),
        (at(2, note="started cold"), "rank 2 in an unknown place (started cold)"),
    ],
)
def test_a_rank_that_cannot_run_is_described(stack: Stack, text: str) -> None:
    assert stacks.describe(stacks.group([stack])) == text


def test_a_report_has_what_a_person_needs() -> None:
    groups = stacks.group([at(0, *ALL_REDUCE), at(1, *ALL_REDUCE), at(2, *READ)], node="n0")
    assert stacks.report(groups, stacks.suspects(groups)) == (
        "2 ranks in all_reduce, rank 2 in data.py:41 read\n"
        "not in a collective: rank 2, likely what the others wait for\n"
        "\n"
        "all_reduce: ranks 0, 1 on n0\n"
        "    distributed_c10d.py:3252 all_reduce\n"
        "    c10d_logger.py:83 wrapper\n"
        "    train.py:28 main\n"
        "    train.py:89 <module>\n"
        "\n"
        "data.py:41 read: rank 2 on n0\n"
        "    data.py:41 read\n"
        "    train.py:28 main\n"
        "    train.py:89 <module>\n"
    )
