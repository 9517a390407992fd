"""Tensors lie in flat buffers and come out as they went in, and those that nobody had come out as None."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from holdfast.exact.buffers import Flat


def tensors() -> list[torch.Tensor]:
    torch.manual_seed(0)
    image = torch.randn(3, 4, 5, 5).to(memory_format=torch.channels_last)
    return [
        torch.randn(3, 5),
        torch.randn(7).bfloat16(),
        torch.randn(()),
        torch.empty(0, 4),
        image,
        torch.randn(2, 2, dtype=torch.float64),
        torch.randn(9).bfloat16(),
        torch.randn(4, 6).t(),
    ]


def test_what_goes_in_comes_out_with_its_layout() -> None:
    given = tensors()
    flat = Flat(given)
    assert [spec.dtype for spec in flat.specs] == [torch.float32, torch.bfloat16, torch.float64]
    flats = flat.gather(given)
    assert [buffer.numel() for buffer in flats] == [spec.size for spec in flat.specs]
    for view, tensor in zip(flat.views(flats), given, strict=True):
        assert view is not None and torch.equal(view, tensor) and view.dtype == tensor.dtype
        assert view.stride() == tensor.stride() or not tensor.numel()
        assert view.data_ptr() % 64 == flats[0].data_ptr() % 64 or not tensor.numel()
    into = [torch.zeros_like(tensor) for tensor in given]
    assert flat.scatter(flats, into) == [True] * len(given)
    assert all(torch.equal(left, right) for left, right in zip(into, given, strict=True))


def test_a_gradient_that_no_leaf_had_stays_none_and_others_count_as_zeros() -> None:
    given = tensors()
    flat = Flat(given)
    first: list[torch.Tensor | None] = [*given]
    first[0] = first[1] = first[3] = None
    second: list[torch.Tensor | None] = [None, given[1], *([None] * 6)]
    left, right = flat.gather(first), flat.gather(second)
    for into, more in zip(left, right, strict=True):
        into.add_(more)
    views = flat.views(left)
    assert [view is None for view in views] == [True, False, False, True, False, False, False, False]
    for view, tensor in zip(views, given, strict=True):
        assert view is None or torch.equal(view, tensor)
    into_these = [torch.full_like(tensor, 5) for tensor in given]
    there = flat.scatter(left, into_these)
    assert there == [view is not None for view in views]
    assert torch.equal(into_these[0], torch.full((3, 5), 5.0)) and torch.equal(into_these[2], given[2])


def test_a_buffer_that_was_used_before_keeps_nothing() -> None:
    given = tensors()
    flat = Flat(given)
    flats = flat.gather(given)
    addresses = [buffer.data_ptr() for buffer in flats]
    again = flat.gather([None] * len(given), flats)
    assert [buffer.data_ptr() for buffer in again] == addresses
    assert not any(buffer.any() for buffer in again)
    assert flat.views(again) == [None] * len(given)


def test_many_ones_do_not_become_none_in_few_bits() -> None:
    flat = Flat([torch.zeros(2, dtype=torch.float16)])
    [total] = flat.gather([torch.zeros(2)])
    for _ in range(20):
        total.add_(total.clone())
    assert flat.views([total])[0] is not None


def test_nothing_at_all_is_fine() -> None:
    flat = Flat([])
    assert flat.specs == [] and flat.gather([]) == [] and flat.views([]) == []


def test_what_cannot_be_summed_is_refused() -> None:
    with pytest.raises(TypeError, match=r"tensor 1 is torch.int64"):
        Flat([torch.ones(1), torch.ones(1, dtype=torch.int64)])
    table = nn.Embedding(3, 2, sparse=True)
    table(torch.tensor([1])).sum().backward()
    flat = Flat([table.weight])
    with pytest.raises(ValueError, match=r"came as torch.sparse_coo"):
        flat.gather([table.weight.grad])
    with pytest.raises(ValueError, match="0 tensors came"):
        flat.gather([])
